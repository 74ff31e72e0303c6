"""What constructors are given: unknown names, wrong values, missing libraries are refused there."""

from __future__ import annotations

import ast
import inspect
import json
import math
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from core import ModelParallel, Space, WorldOptions, check_whole, refuses_unknown
from processes import interpret
from pytorch_lightning import Trainer

import lightning_omni as omni
from lightning_omni import FSDP, Compression, Elastic, Server, methods, simulator
from lightning_omni.errors import ConfigurationError, UnknownArgument, UnsupportedError
from lightning_omni.methods import DiLoCo
from lightning_omni.simulator import Cluster
from lightning_omni.strategy.pytorch_lightning import OmniStrategy
from lightning_omni.topology import Topology
from lightning_omni.tuning.callback.pytorch_lightning import DeviceTuner, OmniTuner

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (OmniStrategy, {"group": 2}, "OmniStrategy(group=2): there is no argument group; did you mean groups=2?"),
        (OmniStrategy, {"find_unused_parameter": True}, "did you mean find_unused_parameters=True?"),
        (OmniStrategy, {"bucket_cap": 1}, "did you mean bucket_cap_mb=1?"),
        (OmniStrategy, {"host": "10.0.0.9"}, "there is no argument host; pass server=Server(host='10.0.0.9')"),
        (OmniStrategy, {"shards": 2}, "there is no argument shards; pass model_parallel=FSDP(shards=2)"),
        (OmniStrategy, {"xyz": 1}, "it takes groups, method, data"),
        (OmniStrategy, {"device_ids": [0]}, "Lightning passes it to DistributedDataParallel"),
        (OmniTuner, {"buget": 0.2}, "OmniTuner(buget=0.2): there is no argument buget; did you mean budget=0.2?"),
        (OmniTuner, {"metric": "val_loss"}, "it takes target, monitor, space"),
        (DeviceTuner, {"bf": "skip"}, "did you mean bf16='skip'?"),
    ],
)
def test_a_name_that_there_is_not_is_refused_with_the_one_that_was_meant(make: Any, given: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make(**given)
    assert said in str(caught.value)
    assert isinstance(caught.value, TypeError) == ("no argument" in str(caught.value))


@pytest.mark.parametrize(
    ("variable", "meant"), [("GROUP", "GROUPS"), ("METHODS", "METHOD"), ("SERVE", "SERVER"), ("KEYS", "KEY")]
)
def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant(
    variable: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"LIGHTNING_OMNI_{variable}", "2")
    with pytest.raises(ConfigurationError, match=f"_{variable} in .* rename it to LIGHTNING_OMNI_{meant}$"):
        OmniStrategy(groups=2)


def test_variables_that_kubernetes_sets_for_a_service_are_not_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in ("", "SERVER_", "DATA_"):
        for name in ("PORT", "SERVICE_HOST", "SERVICE_PORT", "PORT_5555_TCP_ADDR"):
            monkeypatch.setenv(f"LIGHTNING_OMNI_{service}{name}", "tcp://10.0.0.9:5555")
    assert OmniStrategy(groups=2).world_options.server.address is None


ALONE = """
from pytorch_lightning import Trainer
from pytorch_lightning.demos.boring_classes import BoringModel
from lightning_omni.strategy.pytorch_lightning import OmniStrategy

quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
strategy = OmniStrategy(server="tcp://127.0.0.1:9")
Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, limit_val_batches=0, **quiet).fit(BoringModel())
"""


@pytest.mark.slow
@pytest.mark.processes
def test_one_group_says_that_it_does_not_use_the_server_that_it_was_given() -> None:
    ended = interpret(ALONE)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout + ended.stderr
    assert "nothing is pushed, so server='tcp://127.0.0.1:9' has no effect" in said
    assert "or elastic=True to join the server's run" in said


def test_what_ddp_takes_is_passed_on() -> None:
    options: dict[str, Any] = {"find_unused_parameters": True, "static_graph": False, "gradient_as_bucket_view": True}
    assert OmniStrategy(groups=2, start_method="popen", **options).ddp_options == options


def test_a_strategy_of_a_users_own_may_have_arguments_of_its_own() -> None:
    class Mine(OmniStrategy):
        def __init__(self, mine: int, **others: Any) -> None:
            super().__init__(**others)
            self.mine = mine

    assert Mine(mine=3, groups=2).mine == 3
    with pytest.raises(UnknownArgument, match=r"Mine.*did you mean groups=2"):
        Mine(mine=3, group=2)


@pytest.mark.parametrize("kind", [OmniTuner, DeviceTuner])
def test_signatures_are_still_there_to_be_read(kind: type) -> None:
    kinds = [each.kind for each in inspect.signature(kind).parameters.values()]
    assert set(kinds) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


BAD: dict[Any, dict[str, list[Any]]] = {
    OmniTuner: {
        "target": ["0.88", True, math.nan, math.inf, torch.tensor(1.0)],
        "monitor": [None, 3],
        "budget": ["0.1", True, -0.1, 1.0, math.nan, None],
        "space": [["groups"], "groups", 3],
        "retune_every": [0, True, 1.5, "1", math.nan],
        "mode": ["least", 1, True],
        "seed": [-1, 1.0, "1", None, True, 1 << 40],
    },
    DeviceTuner: {
        "bf16": ["bf16-mixed", True, None],
        "budget": [0, -1, math.nan, "60", None, True],
        "tolerance": [0, -1, math.nan, "0.1", True],
        "setting": [{}, "fast"],
        "batches": [[], 3, "batch"],
    },
    OmniStrategy: {
        "groups": ["2", 2.0, True],
        "method": [3, 0.5],
        "server": [3, "10.0.0.9:5555"],
        "data": [3],
        "merged": [3],
        "rebalance": [True, "on"],
        "compression": [8, "int4", None, "topk:3", {"push": "int8"}],
        "overlap": ["yes", 1, None],
        "validation": ["publish", True, None, 3],
        "elastic": ["yes", 1, 0.5],
        "model_parallel": ["fsdp2", True, "ddp", 3],
    },
    Compression: {
        "push": [8, None, {"name": "int8"}],
        "pull": [8, None],
        "all_reduce": [8, "int8", None, "powersgd:0"],
    },
    Server: {
        "address": [3],
        "count": [0, -1, 1.5, "3", "per-rank", None, True],
        "host": [3],
        "encryption": ["on please", True, 3],
        "save": ["30", 0, -1.0, math.nan, math.inf, True],
        "record": [3],
        "max_nonfinite_pushes": ["50", 1.5, math.nan, True],
        "threads": [0, 1.5, "2", None, True],
        "transport": ["zeromq", 3],
    },
    Elastic: {
        "join": ["yes", 1, 0.5],
        "max_rejoins": ["3", -1, 1.5, True, None],
        "timeout": ["600", 0, -1.0, 1.5, math.nan, math.inf, True],
        "heartbeat": ["30", None, math.nan, math.inf, True],
    },
    FSDP: {"shards": ["2", 1, 0, 2.0, True], "distributed_checkpoint": ["yes", 1, None]},
}

BAD[WorldOptions] = {
    **{
        name: values for name, values in BAD[OmniStrategy].items() if name in inspect.signature(WorldOptions).parameters
    },
    "timeout": [30, None, timedelta(0)],
}


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [(make, name, value) for make, names in BAD.items() for name, values in names.items() for value in values],
    ids=lambda each: getattr(each, "__name__", repr(each)),
)
def test_a_value_of_the_wrong_kind_or_size_is_refused_by_name(make: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^({make.__name__}\()?{name}=") as caught:
        make(**{name: value})
    assert "(" not in str(caught.value).partition("=")[0] or "): pass " in str(caught.value)


@pytest.mark.parametrize("make", BAD)
def test_every_argument_has_values_that_are_refused(make: Any) -> None:
    own = [name for name in inspect.signature(make.__init__).parameters if name not in ("self", "ddp")]
    assert set(own) <= set(BAD[make])


def test_good_values_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    OmniTuner(target=numpy.float32(0.5), budget=0.5, seed=numpy.int64(3), retune_every=None, space={"groups": [1, 2]})
    OmniTuner(target=-3, budget=0.999)
    DeviceTuner(budget=math.inf, bf16="apply", batches=[torch.zeros(1)])
    check_whole("seed", 0, "a whole number")


@pytest.mark.parametrize("monitor", ["val_rmse", "perplexity", "val/MAE"])
def test_a_target_of_a_metric_whose_name_does_not_say_what_is_better_needs_a_mode(monitor: str) -> None:
    """Taken for one that has to rise, it would be reached by the worst of models, and at once."""
    with pytest.raises(ConfigurationError, match=r'monitor=.* pass mode="min" or mode="max"'):
        OmniTuner(target=0.3, monitor=monitor)
    assert OmniTuner(target=0.3, monitor=monitor, mode="min")._options.is_reached(0.2)
    assert OmniTuner(target=0.3, monitor="val/Loss")._options.is_reached(0.2)
    assert OmniTuner(target=0.3, monitor="val_F1")._options.is_reached(0.4)
    assert OmniTuner(monitor=monitor)._options.target is None


def test_numbers_of_numpy_are_counts_like_any_other_and_are_kept_as_pythons() -> None:
    numpy = pytest.importorskip("numpy")
    two, four = numpy.int64(2), numpy.int32(4)
    server = Server(count=two, max_nonfinite_pushes=four, threads=two)
    elastic = Elastic(max_rejoins=four, heartbeat=numpy.float32(4))
    given: dict[str, Any] = {"groups": two, "server": server, "elastic": elastic}
    strategy = OmniStrategy(method=DiLoCo(period=four, outer_lr=numpy.float32(0.5)), **given)
    sharded = FSDP(shards=two)
    model_parallel = ModelParallel(two, numpy.int8(1))
    tuner = OmniTuner(seed=two, retune_every=two, space={"groups": [numpy.int64(1), two], "momentum": numpy.float32(0)})
    made: list[Any] = [strategy.world_options, strategy._fit_options, server, elastic, sharded, model_parallel]
    made += [WorldOptions(**given), Cluster.even(four, servers=two)]
    kept = [value for each in made for value in vars(each).values()]
    kept += [
        *msgspec.structs.astuple(strategy.world_options.resolved_method()),
        tuner._options.seed,
        tuner._options.retune_every,
    ]
    space = Space.of(tuner._options.space, ranks=2)
    kept += [value for values in vars(space).values() if isinstance(values, (list, tuple)) for value in values]
    assert not [value for value in kept if isinstance(value, numpy.generic)]
    assert strategy.world_options.groups == 2
    with pytest.raises(ConfigurationError, match="groups=0: at least one"):
        OmniStrategy(groups=numpy.int64(0))
    with pytest.raises(ConfigurationError, match=r"^method=.*neither text nor a number"):
        OmniStrategy(method=DiLoCo(period=4, dynamic_steps=object()))  # type: ignore[arg-type]
    assert Topology.even(four, two) == Topology(((0, 1), (2, 3)))


def test_positional_arguments_still_work() -> None:
    class Thing:
        @refuses_unknown
        def __init__(self, one: int, two: int = 2) -> None:
            self.both = one, two

    assert Thing(1).both == (1, 2)
    assert Thing(1, two=3).both == (1, 3)


# --- Libraries --------------------------------------------------------------------------------------------------------

WITHOUT = """
import importlib, json, pkgutil, sys
import pytorch_lightning  # which takes what is installed for what can be imported
gone = []

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in gone:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def miss(*names):
    gone[:] = names
    for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
        del sys.modules[name]

sys.meta_path.insert(0, Blocker())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in gone else real(name, *rest)
miss("matplotlib")
import lightning_omni
for module in pkgutil.walk_packages(lightning_omni.__path__, "lightning_omni."):
    if not module.name.endswith(("__main__", "ray.backend")):  # Ray is not installed
        importlib.import_module(module.name)
from lightning_omni.errors import ConfigurationError
from lightning_omni.palette import new_figure
from lightning_omni.tuning.callback.pytorch_lightning import DeviceTuner, OmniTuner

def refusal(call):
    try:
        call()
        return ""
    except ConfigurationError as error:
        return str(error)

def refusals():
    calls = {"tuner": OmniTuner, "device": DeviceTuner, "plot": lambda: new_figure(1, 1)}
    return {name: said for name, call in calls.items() if (said := refusal(call))}

print(json.dumps(refusals()))
"""


@pytest.mark.slow
def test_without_an_extra_everything_imports_and_what_needs_it_says_so_at_once() -> None:
    ended = interpret(WITHOUT)
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = json.loads(ended.stdout.splitlines()[-1])
    assert set(said) == {"plot"}
    assert said["plot"].startswith("pictures need matplotlib; install it with: pip install")
    assert "lightning-omni[" in said["plot"]


DISTRIBUTIONS = {
    "skopt": "scikit-optimize",
    "sklearn": "scikit-learn",
    "zmq": "pyzmq",
    "typing_extensions": "typing-extensions",
}
OF_OTHERS = {"lightning_utilities": "pytorch-lightning", "packaging": "pytorch-lightning"}


def test_whatever_is_imported_is_among_the_dependencies_or_an_extra() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [
        *project["dependencies"],
        *(each for name in ("plot", "metrics", "ray", "lightning", "pytorch-lightning") for each in extras[name]),
    ]
    names = {inspect.cleandoc(each).split("[")[0].split(">")[0].split("=")[0].strip() for each in listed}
    for path in sorted((ROOT / "lightning_omni").rglob("*.py")):
        for found in imported(ast.parse(path.read_text())):
            if found in sys.stdlib_module_names or found in ("lightning_omni", "__future__", "lightning_fabric"):
                continue
            name = DISTRIBUTIONS.get(found, OF_OTHERS.get(found, found.replace("_", "-")))
            assert name in names, f"{path.relative_to(ROOT)} imports {found}"


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of all modules that are imported anywhere, also by name."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                found.add(argument.value)
    return {name.partition(".")[0] for name in found}


def test_several_groups_refuse_a_process_group_of_the_users() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    OmniStrategy(groups=2).parts.grouping.check_several(trainer)
    with pytest.raises(UnsupportedError, match="process_group= is that of each compute group"):
        OmniStrategy(groups=2, process_group=object()).parts.grouping.check_several(trainer)


def test_one_server_per_node_is_no_address() -> None:
    with pytest.raises(ConfigurationError, match=r'Server\(address="per-node"\): .*pass Server\(count="per-node"\)'):
        Server("per-node")


MOST_ARGUMENTS = 14


def test_public_constructors_and_functions_have_few_arguments() -> None:
    counts = {}
    for module in (omni, methods, simulator):
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isfunction(found) or (inspect.isclass(found) and found.__init__ is not object.__init__):
                parameters = inspect.signature(found.__init__ if inspect.isclass(found) else found).parameters.values()
                named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
                counts[name] = len(named) - inspect.isclass(found)
    assert {"OmniStrategy", "WorldOptions", "simulate", "Server"} <= counts.keys()
    assert {name: count for name, count in counts.items() if count > MOST_ARGUMENTS} == {}
