"""The faces of the package: both of Lightning's namespaces, start methods, and the loop without Lightning."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import Process, interpret
from runs import SCRIPTS, run

import lightning_omni as omni


def test_the_strategy_works_with_the_other_namespace_too() -> None:
    options = {"fits": [{"devices": 2}]}
    finished = run("groups.py", options, timeout=220, env={"OMNI_TEST_NAMESPACE": "lightning.pytorch"})
    for each in finished.results.values():
        assert each[0]["report"]["updates"] == 256 // 8
        assert each[0]["report"]["groups"] == 2


NAMESPACES = ("pytorch_lightning", "lightning.pytorch")
ORDERS = [
    f"{first}, {second}"
    for name in NAMESPACES
    for first, second in (("lightning_omni", name), (name, "lightning_omni"))
]
AS_SCRIPTS = "pytorch_lightning, lightning_omni"
"""The order in which the other tests' scripts import them, all of which would fail."""
ALWAYS = [each for each in ORDERS if each != AS_SCRIPTS]
COPIES = """
import importlib, os, pickle, sys
import torch, torch._dynamo, torchmetrics, jsonargparse  # what both namespaces import: once, not in each of the copies
assert not {"lightning", "pytorch_lightning", "lightning_omni"} & set(sys.modules)

OPTIONS = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
OPTIONS |= dict(enable_model_summary=False)

def say(*words):
    print(*words, flush=True)

def names():
    exec("from lightning_omni import DeviceTuner, OmniStrategy, OmniTuner", globals())

def subclass():
    class Mine(OmniStrategy):
        "As a user writes it."
        def __init__(self, extra: int = 0, **others) -> None:
            super().__init__(**others)
            self.extra = extra

        def setup_environment(self) -> None:
            super().setup_environment()
            self.calls = ["setup_environment"]

    Mine.__qualname__ = "Mine"
    globals().update(Mine=Mine)

def belongs(strategy, namespace):
    kinds = importlib.import_module(f"{namespace}.strategies")
    other, = set(NAMESPACES) - {namespace}
    mro = " ".join(kind.__module__ for kind in type(strategy).__mro__)
    return isinstance(strategy, kinds.DDPStrategy) and namespace in mro and f"{other}." not in mro.replace(
        f"lightning_omni.strategy.{other.split('.')[0]}", "")

def cells(head, namespace, strategies):
    for name, strategy in strategies.items():
        pl = importlib.import_module(namespace)
        tuners = [OmniTuner(budget=0), DeviceTuner(budget=1)]
        trainer = pl.Trainer(devices=2, strategy=strategy, callbacks=tuners, **OPTIONS)
        alone = pl.Trainer(devices=2, callbacks=tuners[0], **OPTIONS).callbacks[0] is tuners[0]
        made = trainer.strategy
        copied = pickle.loads(pickle.dumps(made))
        found = [made is strategy or name == "by name", isinstance(made, OmniStrategy), belongs(made, namespace)]
        found += [isinstance(each, pl.Callback) for each in tuners]
        found += [alone, type(copied) is type(made), copied.world_options.groups == made.world_options.groups]
        if name.startswith("subclass"):
            found += [isinstance(made, Mine), made.extra == copied.extra == 3, type(made).__name__ == "Mine"]
        say(head, namespace, name, all(found), "" if all(found) else found)

def fits(head, namespace):
    pl = importlib.import_module(namespace)
    model = importlib.import_module(f"{namespace}.demos.boring_classes").BoringModel()
    strategy = Mine(3, groups=1)
    tuners = [OmniTuner(budget=0), DeviceTuner(budget=0.1, bf16='skip')]
    trainer = pl.Trainer(devices=1, strategy=strategy, max_steps=2, limit_val_batches=0, callbacks=tuners, **OPTIONS)
    trainer.fit(model)
    say(head, namespace, "fits", strategy.calls, trainer.global_step, tuners[1].problem)

def order(given):
    first, second = given.split(", ")
    namespace = first if second == "lightning_omni" else second
    other, = set(NAMESPACES) - {namespace}
    earlier = None
    for each in (first, second):
        if each != "lightning_omni":
            importlib.import_module(each)
            continue
        names()
        subclass()
        if first == each:
            hidden = {} if namespace == "lightning.pytorch" else {"lightning": None}
            sys.modules.update({"lightning": None, "pytorch_lightning": None})
            try:
                OmniStrategy()
            except ImportError as error:
                say(given, str(error))
            del sys.modules["lightning"], sys.modules["pytorch_lightning"]
            sys.modules.update(hidden)  # not installed
            earlier = OmniStrategy(groups=2)
            for name in hidden:
                del sys.modules[name]
    kinds = {"by name": "omni_2", "made": OmniStrategy(groups=2), "subclass": Mine(3, groups=2)}
    kinds |= {"made before": earlier} if earlier is not None else {}
    cells(given, namespace, kinds)
    say(given, "imported", other in sys.modules)
    if earlier is None:
        return
    kept = {"made first": OmniStrategy(groups=2), "subclass first": Mine(3, groups=2)}
    importlib.import_module(other)
    cells(given, other, {**kept, "by name": "omni_2", "made": OmniStrategy(groups=2), "subclass": Mine(3, groups=2)})
    cells(given, namespace, {"made again": OmniStrategy(groups=2), "subclass again": Mine(3, groups=2)})
    fits(given, other)

def command_line(namespace):
    names()
    subclass()  # before there is anything of Lightning's
    pl = importlib.import_module(namespace)
    for strategy in ("lightning_omni.OmniStrategy", "__main__.Mine"):
        parser = importlib.import_module(f"{namespace}.cli").LightningArgumentParser()
        parser.add_lightning_class_args(pl.Trainer, "trainer")
        options = ["accelerator=cpu", "devices=2", "logger=false", f"strategy={strategy}"]
        options += ["strategy.groups=2", "callbacks+=lightning_omni.OmniTuner", "strategy.start_method=fork"]
        # Of a class without a source, as here, it does not see what DDPStrategy passes on.
        options += ["strategy.extra=3" if "Mine" in strategy else "strategy.find_unused_parameters=true"]
        parsed = parser.parse_args([f"--trainer.{option}" for option in options])
        saved = parser.dump(parsed)
        trainer = pl.Trainer(**vars(parser.instantiate_classes(parser.parse_string(saved)).trainer))
        tuner = any(type(each).__name__ == "OmniTuner" for each in trainer.callbacks)
        made = trainer.strategy
        kept = made.extra == 3 if "Mine" in strategy else made.ddp_options["find_unused_parameters"]
        say(namespace, type(made).__name__, kept, tuner, type(made.launcher).__name__)
    # Beside DDP's defaults.
    options = [*options[:3], "strategy=lightning_omni.OmniStrategy", "strategy.model_parallel=fsdp"]
    parser.instantiate_classes(parser.parse_args([f"--trainer.{option}" for option in options]))

for function, given in [*((order, each) for each in CHOSEN), *((command_line, each) for each in NAMESPACES)]:
    if os.fork():
        os.wait()
        continue
    function(given)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def namespaces(is_all: bool) -> list[str]:
    """What copies of a process say that has imported neither namespace."""
    done = interpret(f"CHOSEN, NAMESPACES = {ORDERS if is_all else ALWAYS}, {NAMESPACES}\n{COPIES}")
    assert done.returncode == 0, done.stderr[-2000:]
    return [*done.stdout.splitlines(), done.stderr[-2000:]]


MADE = ("by name", "made", "subclass")


@pytest.mark.parametrize("order", [*ALWAYS, pytest.param(AS_SCRIPTS, marks=pytest.mark.exhaustive)])
def test_strategies_belong_to_the_trainer_in_whatever_order_things_are_imported(
    namespaces: list[str], order: str
) -> None:
    namespace = order.replace("lightning_omni", "").strip(", ")
    for name in (*MADE, "made before") if order.startswith("lightning_omni") else MADE:
        assert f"{order} {namespace} {name} True " in namespaces, namespaces


@pytest.mark.parametrize("order", [each for each in ORDERS if each.startswith("lightning_omni")])
def test_strategies_belong_to_the_trainer_of_a_namespace_that_is_imported_later(
    namespaces: list[str], order: str
) -> None:
    [first] = set(NAMESPACES) & set(order.split(", "))
    [later] = set(NAMESPACES) - {first}
    for name in (*MADE, "made first", "subclass first"):
        assert f"{order} {later} {name} True " in namespaces, namespaces
    for name in ("made again", "subclass again"):
        assert f"{order} {first} {name} True " in namespaces, namespaces
    assert f"{order} {later} fits ['setup_environment'] 2 None" in namespaces, namespaces


@pytest.mark.parametrize("order", [*ALWAYS, pytest.param(AS_SCRIPTS, marks=pytest.mark.exhaustive)])
def test_no_namespace_is_imported_that_is_not_used(namespaces: list[str], order: str) -> None:
    assert f"{order} imported False" in namespaces, namespaces


def test_a_strategy_without_lightning_names_what_to_install(namespaces: list[str]) -> None:
    assert any("OmniStrategy needs Lightning: pip install 'lightning-omni[lightning]'" in each for each in namespaces)


def test_strategy_and_tuner_are_those_of_the_command_line_that_names_them(namespaces: list[str]) -> None:
    for namespace in NAMESPACES:
        for name in ("OmniStrategy", "Mine"):
            assert f"{namespace} {name} True True OmniProcesses" in namespaces, namespaces


def test_every_public_name_is_there_and_an_unknown_one_is_not() -> None:
    for name in omni.__all__:
        assert getattr(omni, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Tuner'"):
        omni.Tuner  # noqa: B018


LOOP = Path(__file__).parents[1] / "docs" / "how-to" / "loops.md"
LOOPS: dict[str, dict[str, Any]] = {
    "one group": {"groups": 1, "merges": False},
    "two groups": {"groups": 2, "merges": False},
    "a merged head": {"groups": 2, "merges": True},
    "local steps": {"groups": 2, "merges": False, "method": "local_sgd:period=4"},
}
INTERRUPTED = {
    "between two steps": {"interrupted": "async_sgd"},
    "during an exchange": {"interrupted": "diloco:period=8,fragments=4,delay=1"},
}
MISTAKES = {f"mistakes, {each}": {"mistake in": each} for each in ("async_sgd", "local_sgd:period=4")}
BESIDE = {f"beside, {each}": {"beside": each} for each in ("async_sgd", "local_sgd:period=4")}
UNLIKE = {f"unlike, {each}": {"unlike": each} for each in ("a layer", "an optimizer", "a class", "an order")}
LAID = {"not contiguous": {"laid": "async_sgd"}}
WRONG_NODES = {"no nodes": "[3, -1]", "a number of nodes": "2"}
UNLIKE_SETTINGS = {
    "other groups": "setting groups is 2 on rank 1, and 1 on rank 0",
    "another method": "setting method is LocalSGD(period=4, ",
    "another compression": "setting compression=Compression(all_reduce=) is RoundedBF16() on rank 1, and Exact() on",
    "other exchanges": "setting overlap is True on rank 1, and False on rank 0",
    "another server": "setting server is 'tcp://127.0.0.1:5555' on rank 1, and None on rank 0",
}
MISPLACED = {"LIGHTNING_OMNI_GROUPS": "2", "LIGHTNING_OMNI_METHOD": "hardsync"}
FORGOTTEN = {
    f"no OmniOptimizer steps, {each}": {"stepped": each}
    for each in ("the optimizer", "one of two", "a stranger", "by hand")
}
SHORT = {each: {"short": each} for each in ("diloco:period=9", "downpour:n_push=9,n_fetch=9", "diloco:period=2")}
CHANGED = {each: {"changed": each} for each in ("unfrozen", "wrapped again")}
WITHOUT_STEPS = {f"steps {each}": {"stepped": each} for each in ("on one rank", "on no rank")}
REGROUPED = {f"regrouped, {groups} groups before": {"regrouped": groups} for groups in (1, 2)}
THEN_ONE = {f"one group after two, {each}": {"first": each} for each in ("async_sgd", "local_sgd:period=4")}
DISCARDED = {f"a state, {each}": {"discarded": each} for each in ("clear", "pop", "set", "write", "read")}
OUTSIDE = {f"outside, {each} DDP": {"outside": f"{each} DDP"} for each in ("with", "without")}
MERGED = {f"statistics, {each}": {"merged": each == "merged"} for each in ("merged", "not merged")}
LOADED = {
    f"loaded, {each}": {"last": each}
    for each in ("async_sgd", "async_sgd, alone", "async_sgd, alone, as one", "local_sgd:period=2, alone")
}
THEN_DDP = {
    f"plain DDP after two groups, {each}": {"then": each} for each in ("async_sgd", "local_sgd:period=4", "gossip")
}
REFUSED: dict[str, dict[str, Any]] = {
    "not wrapped": {"groups": 1, "wraps": ""},
    "not wrapped, a closure": {"groups": 1, "wraps": "closure"},
    "DDP of all ranks": {"groups": 2, "wraps": "ddp"},
    "another World": {"groups": 2, "wraps": "another World"},
}


def run_loops(
    folder: Path, loops: dict[str, dict[str, Any]], ranks: int = 2, copies: bool = True
) -> list[dict[str, Any]]:
    """What each rank of torchrun's found, by the name of the loop.

    Args:
        folder: an empty one, for what they find.
        loops: options of each.
        ranks: how many there are.
        copies: ranks and servers are copies of a process that has imported Lightning, too, see `processes.Process`.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    afresh = [] if copies else ["--no-python", sys.executable]
    process = Process(
        [sys.executable, *launcher, *afresh, str(SCRIPTS / "plain_loop.py"), json.dumps(loops)],
        {"OMNI_TEST_FOLDER": str(folder), "OMNI_TEST_SERVERS": str(len(loops))},
    )
    try:
        assert process.end(timeout=220) == 0, process.output[-4000:]
    finally:
        process.kill()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def loop_of_the_page(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found in the loop of the page, as its reader starts it: nothing is imported beforehand."""
    return run_loops(tmp_path_factory.mktemp("page"), {"page": {"page": str(LOOP)}}, copies=False)


@pytest.fixture(scope="module")
def plain_loops(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found in loops that train, fail or are refused."""
    loops: dict[str, dict[str, Any]] = {**INTERRUPTED, **LOOPS, **MISTAKES, **REFUSED, **CHANGED, "last": {"rank": 1}}
    return run_loops(tmp_path_factory.mktemp("loops"), loops)


@pytest.fixture(scope="module")
def changing_loops(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found in loops with more than weights, or with other groups in the middle."""
    loops: dict[str, dict[str, Any]] = {**BESIDE, **LAID, **REGROUPED, **UNLIKE, **FORGOTTEN, **WITHOUT_STEPS}
    loops |= {**THEN_ONE, **SHORT, **THEN_DDP, **DISCARDED, **OUTSIDE, "alone": {"alone": 0}}
    loops |= {"trains on alone": {"alone": 0, "goes_on": True}, "generated": {"generated": 3}}
    loops["compiled"] = {"compiled": 1}
    loops |= {f"repeated, {each}": {"repeated": each} for each in ("async_sgd", "local_sgd:period=1")}
    loops |= {
        **MERGED,
        **LOADED,
        "mishandled": {"mishandled": "local_sgd:period=4"},
        "sharded": {"sharded": 1},
        **{f"unwrapped, {each}": {"unwrapped": each} for each in ("unlike", "alike")},
        "inferred": {"inferred": "downpour:n_push=2,n_fetch=2"},
        "forked": {"forked": "of a fork"},
        **{f"before, {each}": {"before": each} for each in ("nodes", "an option", *WRONG_NODES, *UNLIKE_SETTINGS)},
        "misplaced": {"misplaced": MISPLACED},
        "spelled otherwise": {"misplaced": {"LIGHTNING_OMNI_METHOD": "async_sgd:bound=null"}},
        **{f"sampled {each}": {"sampled": each} for each in ("inside", "asks", "before")},
        **{f"inner, {groups}": {"inner": groups} for groups in (1, 2)},
        "nested": {"nested": 2},
        **{f"returned, {kind}": {"returned": kind} for kind in ("SGD", "Adagrad")},
        "target": {"target": "downpour:n_push=4,n_fetch=4"},
    }
    return run_loops(tmp_path_factory.mktemp("changing"), loops)


def test_the_loop_of_the_page_trains_and_saves_what_all_groups_have_trained(
    loop_of_the_page: list[dict[str, Any]],
) -> None:
    updates, parameters = 3 * 1024 // 32, 6
    for each in loop_of_the_page:
        assert (each["page"]["epoch"], each["page"]["steps"]) == (2, [updates] * parameters)
        assert each["page"]["loss"] == loop_of_the_page[0]["page"]["loss"] < 1
        assert each["page"]["is saved"]


def test_a_loop_without_lightning_does_not_import_it(loop_of_the_page: list[dict[str, Any]]) -> None:
    for each in loop_of_the_page:
        assert not each["has imported Lightning"]


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_without_lightning_trains_under_torchrun(plain_loops: list[dict[str, Any]], name: str) -> None:
    results = [rank[name] for rank in plain_loops]
    assert results[0]["began"] == results[1]["began"]
    assert results[0]["weights"] == results[1]["weights"]
    for each in results:
        assert each["last"] < 0.2 * each["first"]
        assert each["lr"] == [0.025]
        assert (each["staleness"] >= 0) == (name != "one group")


@pytest.mark.parametrize("name", LOOPS)
def test_hooks_on_omni_optimizer_are_called_in_each_step_and_see_the_state(
    plain_loops: list[dict[str, Any]], name: str
) -> None:
    steps = ["before", "after"] * 40
    assert plain_loops[1][name]["calls"] == steps
    assert plain_loops[0][name]["calls"] == [*steps, "4 states"]


@pytest.mark.parametrize("name", LOOPS)
def test_a_step_of_the_wrapped_optimizer_by_itself_is_refused_among_groups(
    plain_loops: list[dict[str, Any]], name: str
) -> None:
    for each in plain_loops:
        assert ("step() of the OmniOptimizer" in each[name]["raw step"]) == (name != "one group")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_step_of_an_optimizer_inside_the_wrapped_one_is_refused_with_the_remedy(
    plain_loops: list[dict[str, Any]], name: str
) -> None:
    for each in plain_loops:
        inner, attribute = each[name][:2]
        assert inner.startswith("UnsupportedError: SGD.step() would move weights of ")
        assert "call its step(closure)" in inner
        assert attribute.startswith("AttributeError: 'OmniOptimizer' object has no attribute 'first_step'")
        assert ("optimizer.optimizer.first_step" in attribute) == (name != "mistakes, async_sgd")


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_loop_in_which_weights_move_without_an_omni_optimizer_is_refused_with_the_remedy(
    changing_loops: list[dict[str, Any]], name: str
) -> None:
    for each in changing_loops:
        assert "optimizer = OmniOptimizer(optimizer, world)" in each[name]
        assert ("SGD" in each[name]) == (name != "no OmniOptimizer steps, by hand")


@pytest.mark.parametrize("name", LOADED)
def test_a_checkpoint_that_a_loops_last_lines_load_is_what_all_ranks_end_with(
    changing_loops: list[dict[str, Any]], name: str
) -> None:
    one, other = (rank[name] for rank in changing_loops)
    assert one["merged"] == other["merged"], "statistics of a second enter_world, which was given the module"
    for each in (one, other):
        assert each["values"] == [3.0] * 7
        assert each["momentum"] == [7.0] * 4
        assert each["said"] == []


def test_optimizers_that_are_refused_or_have_lost_their_state_are_named(changing_loops: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(one["mishandled"] for one in changing_loops):
        assert "is in two optimizers" in each["twice"]
        assert "LBFGS evaluates the loss several times" in each["LBFGS"]
        assert [one.partition(":")[0] for one in each["said"]] == (
            [] if rank else ["optimizer.state_dict() has no state of SGD"]
        )
        assert each["exchanged"] == 2


def test_a_world_whose_members_hold_the_model_together_has_one_and_all_optimizers_before(
    changing_loops: list[dict[str, Any]],
) -> None:
    for each in changing_loops:
        second, late = each["sharded"]
        assert second.endswith("put all modules into one torch.nn.ModuleDict, and wrap that")
        assert late.endswith("make it before")


@pytest.mark.parametrize("name", WITHOUT_STEPS)
def test_a_loop_may_make_no_step(changing_loops: list[dict[str, Any]], name: str) -> None:
    for each in changing_loops:
        assert each[name] == ""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_step_where_groups_are_synchronized_is_refused_with_the_remedy(
    plain_loops: list[dict[str, Any]], name: str
) -> None:
    for each in plain_loops:
        assert each[name][2].startswith("ConfigurationError: OmniOptimizer.step() where all groups are synchronized")
        assert "call world.enter_compute()" in each[name][2]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_step_by_which_torch_fills_a_state_is_refused_on_a_rank_that_asks_for_it_alone(
    plain_loops: list[dict[str, Any]], name: str
) -> None:
    refusal = "UnsupportedError: the functions of torch.distributed.checkpoint.state_dict (get_state_dict, say) step"
    assert plain_loops[0][name][3].startswith(refusal)
    assert len(plain_loops[1][name]) == 3


@pytest.mark.parametrize("name", LOOPS)
def test_a_step_outside_training_is_refused_with_the_remedy(plain_loops: list[dict[str, Any]], name: str) -> None:
    for each in plain_loops:
        assert ("inside `with world.training():`" in each[name]["refused"]) == (name != "one group")
        assert ("outside `with world.training():`" in each[name]["outside"]) == (name != "one group")
        assert ("inside `with world.training():`" in each[name]["nested"]) == (name != "one group")
        assert each[name]["late"].endswith("make it before")
        assert "call it inside `with world.training():`" in each[name]["regroup"]


@pytest.mark.parametrize("name", THEN_ONE)
def test_a_loop_of_one_group_after_one_of_several_begins_with_one_optimizer_state(
    changing_loops: list[dict[str, Any]], name: str
) -> None:
    """Where it steps at the workers they have left each rank another: members would train different weights."""
    one, other = (each[name] for each in changing_loops)
    assert one[1] == other[1]
    assert one[0] == other[0] == [0, 2]


@pytest.mark.parametrize("name", THEN_DDP)
def test_a_loop_of_plain_ddp_after_one_of_several_groups_begins_with_one_optimizer_state_and_learning_rate(
    changing_loops: list[dict[str, Any]], name: str
) -> None:
    one, other = (each[name] for each in changing_loops)
    assert one[:3] == other[:3]
    assert one[2] == 0.01, "rank 0's, whose schedule has counted four steps"
    assert ["load rank 0's schedule.state_dict()" in each for each in one[3]] == [True]
    assert not other[3]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_step_outside_of_a_loop_that_trains_a_model_of_each_group_is_warned_of_once(
    changing_loops: list[dict[str, Any]], name: str
) -> None:
    one, other = (each[name] for each in changing_loops)
    assert ["each group trains a model of its own" in each for each in one] == [True] * (name == "outside, without DDP")
    assert not other


@pytest.mark.parametrize("name", DISCARDED)
def test_a_state_that_is_discarded_in_place_is_refused_in_a_step_and_carried_where_groups_synchronize(
    changing_loops: list[dict[str, Any]], name: str
) -> None:
    one, other = (each[name] for each in changing_loops)
    left = {"clear": [False, False], "pop": [False, True], "set": [False, True]}.get(name[9:], [True, True])
    assert one["states"] == [[True, True], left]
    for each in (one, other):
        assert ("the state of SGD was loaded or given up between two steps" in each["refused"]) != (
            name == "a state, read"
        )
    assert one.get("written", [[1.0] * 4]) == [[1.0] * 4]


def test_a_rank_that_synchronizes_alone_ends_the_loop_for_all_and_what_each_called_is_named(
    changing_loops: list[dict[str, Any]],
) -> None:
    for each in changing_loops:
        assert "rank 0 called enter_world(module)" in each["alone"]
        assert "rank 1 called the end of training" in each["alone"]


def test_a_rank_that_trains_on_alone_where_the_other_ends_is_told_what_each_called(
    changing_loops: list[dict[str, Any]],
) -> None:
    for each in changing_loops:
        assert "called enter_compute()" in each["trains on alone"]
        assert "called the end of training" in each["trains on alone"]


@pytest.mark.parametrize("method", ["async_sgd", "local_sgd:period=1"])
def test_of_a_second_world_for_the_same_module_nothing_is_said(
    changing_loops: list[dict[str, Any]], method: str
) -> None:
    """Its steps are no steps outside of the first one's loop."""
    assert [each[f"repeated, {method}"] for each in changing_loops] == [[], []]


def test_a_loop_in_a_generator_that_is_left_ends_as_by_a_break(changing_loops: list[dict[str, Any]]) -> None:
    one, other = (each["generated"] for each in changing_loops)
    assert one == other
    assert one[:2] == [[0, 1, 2, 3], []]


def test_a_step_that_torch_compiles_is_the_step(changing_loops: list[dict[str, Any]]) -> None:
    ends = [end for each in changing_loops for end in each["compiled"]]
    assert ends[1:] == ends[:1] * 3


@pytest.mark.parametrize("name", LOOPS)
def test_a_copy_is_the_wrapped_optimizers_and_there_is_none_without_the_state(
    plain_loops: list[dict[str, Any]], name: str
) -> None:
    for each in plain_loops:
        before, inside = each[name]["copies"]
        assert before == "SGD with 0 states"
        if name in ("one group", "local steps"):
            assert inside == "SGD with 4 states"
        else:
            assert "would be without it: call optimizer.state_dict() on rank 0" in inside


def test_a_rank_whose_loop_fails_when_it_is_over_says_so_to_those_that_wait_for_it(
    plain_loops: list[dict[str, Any]],
) -> None:
    lost, why = (each["last"] for each in plain_loops)
    assert why.startswith("weight was written between two steps")
    assert lost[:-1] == [1]
    assert "lost the ranks 1, and a loop begins with all 2; start the script again" in lost[-1]


@pytest.mark.parametrize("name", INTERRUPTED)
def test_a_loop_that_was_interrupted_on_all_ranks_can_be_followed_by_another(
    plain_loops: list[dict[str, Any]], name: str
) -> None:
    """Which ranks others have left behind, ranks know in different ways."""
    one, other = (each[name] for each in plain_loops)
    assert 1 in one["lost"][0]
    assert 0 not in other["lost"][0]
    assert one["lost"][1] == other["lost"][1] == []
    assert one["weights"] == other["weights"]


@pytest.mark.parametrize("name", BESIDE)
def test_what_no_optimizer_moves_is_rank_zeros_where_groups_synchronize_and_averages_are_one(
    changing_loops: list[dict[str, Any]], name: str
) -> None:
    """In a loop without Lightning: before groups synchronize and after, twice, and when they have parted again."""
    for which in ("in the optimizer", "in none", "an average"):
        one, other = (each[name][which] for each in changing_loops)
        assert [mine == theirs for mine, theirs in zip(one, other, strict=True)] == [False, True, False, True, True]
        assert one[4] == one[3]
        for before in (0, 2):
            means = [(mine + theirs) / 2 for mine, theirs in zip(one[before], other[before], strict=True)]
            assert one[before + 1] == (pytest.approx(means, abs=1e-6) if which == "an average" else one[before])


@pytest.mark.parametrize("name", LAID)
def test_tensors_that_are_not_contiguous_become_rank_zeros_as_others_do(
    changing_loops: list[dict[str, Any]], name: str
) -> None:
    """Views with gaps, transposed ones, images whose channels are last on one rank, a mask that is expanded."""
    one, other = (each[name] for each in changing_loops)
    assert [
        {tensor for tensor in mine if mine[tensor] != theirs[tensor]} for mine, theirs in zip(one, other, strict=True)
    ] == [set(one[0]), set(), set(one[0]), set()]
    assert one[0] == one[1]
    assert one[2] == one[3]


def test_what_is_unfrozen_in_a_module_that_is_not_wrapped_again_is_refused(plain_loops: list[dict[str, Any]]) -> None:
    for each in plain_loops:
        assert each["unfrozen"].startswith(
            "step 3: OmniOptimizer.step(): the members of this compute group have differ"
        )
        assert "whenever parameters are unfrozen or added" in each["unfrozen"]
        assert each["wrapped again"] == ""


@pytest.mark.parametrize("name", SHORT)
def test_a_loop_that_is_shorter_than_its_period_says_that_no_step_is_in_the_model(
    changing_loops: list[dict[str, Any]], name: str
) -> None:
    for rank, each in enumerate(changing_loops):
        is_short = name != "diloco:period=2"
        assert (each[name]["moved"] == 0.0) is is_short
        said = [text for text in each[name]["said"] if "has made no update in the 4 steps" in text]
        assert len(said) == (is_short and rank == 0), each[name]["said"]


def test_ranks_with_other_models_or_optimizers_hear_of_it_before_they_wait_for_each_other(
    changing_loops: list[dict[str, Any]],
) -> None:
    one, other = (each["unlike, a layer"] for each in changing_loops)
    words = "rank 1 has a parameter 2.weight, which rank 0 has not (differences in all: 2); all ranks train one model"
    assert one == other
    assert one["error"].startswith(words)
    one, other = (each["unlike, an optimizer"] for each in changing_loops)
    where = "in parameter group 0 of optimizer 0, which rank 0 has; make the same optimizers"
    assert one == other
    assert one["error"].startswith(f"rank 1 has no parameter 1.bias {where}")


def test_ranks_with_optimizers_of_other_classes_hear_of_the_classes(changing_loops: list[dict[str, Any]]) -> None:
    one, other = (each["unlike, a class"] for each in changing_loops)
    assert one == other
    assert one["error"].startswith("the optimizer 0 is Adam on rank 1, and SGD on rank 0; make the same optimizers")


def test_running_statistics_that_a_loop_does_not_merge_are_named(changing_loops: list[dict[str, Any]]) -> None:
    """Ranks would evaluate different models, without a word."""
    one, other = (each["statistics, merged"] for each in changing_loops)
    assert one["mean"] == other["mean"]
    assert one["said"] == other["said"] == []
    one, other = (each["statistics, not merged"] for each in changing_loops)
    assert one["mean"] != other["mean"]
    assert other["said"] == []
    assert "statistics of its own after the loop (1.running_mean and 1 more)" in one["said"][0]
    assert "call world.enter_world(net)" in one["said"][0]


def test_ranks_with_other_buffers_in_a_module_that_is_not_wrapped_are_refused_by_name(
    changing_loops: list[dict[str, Any]],
) -> None:
    """In groups of one rank nothing else would tell that each trains a model of its own."""
    for each in changing_loops:
        [error] = each["unwrapped, unlike"]
        assert error.startswith("the features of the Featured that world.wrap() has not wrapped is of checksum ")
        assert "call world.wrap(net)" in error
    one, other = (each["unwrapped, alike"] for each in changing_loops)
    assert ["statistics of its own after the loop (1.running_mean and 1 more)" in each for each in one] == [True]
    assert other == []


def test_groups_may_synchronize_in_inference_mode(changing_loops: list[dict[str, Any]]) -> None:
    """What a rank keeps of the weights there, its next steps write."""
    assert [each["inferred"] for each in changing_loops] == [9, 9]


def test_a_fork_of_a_rank_ends_with_its_error_and_the_run_goes_on(changing_loops: list[dict[str, Any]]) -> None:
    """Its copy of a socket would never answer, and its goodbye would end the run of its parent."""
    for each in changing_loops:
        assert each["forked"] == {"status": 3, "steps": 4}


def test_nodes_that_do_not_add_up_and_options_that_ddp_has_not_are_refused(
    changing_loops: list[dict[str, Any]],
) -> None:
    """On few ranks, too, where nodes make no difference yet, and no module is wrapped."""
    for each in changing_loops:
        assert each["before, nodes"].startswith("ConfigurationError: ranks_per_node=[1]: torch.distributed has 2 ranks")
        assert each["before, an option"].startswith("TypeError: got an unexpected keyword argument 'find_unused_param")


@pytest.mark.parametrize("name", WRONG_NODES)
def test_what_is_no_list_of_ranks_on_each_node_is_refused(changing_loops: list[dict[str, Any]], name: str) -> None:
    for each in changing_loops:
        assert each[f"before, {name}"].startswith(f"ConfigurationError: ranks_per_node={WRONG_NODES[name]}: ")


@pytest.mark.parametrize("name", UNLIKE_SETTINGS)
def test_ranks_with_other_settings_are_refused_by_name_before_they_wait_for_each_other(
    changing_loops: list[dict[str, Any]], name: str
) -> None:
    """They would train different models, or wait until torch's timeout."""
    for each in changing_loops:
        assert each[f"before, {name}"].startswith(f"ConfigurationError: the {UNLIKE_SETTINGS[name]}")
        assert "pass the same on each of them" in each[f"before, {name}"]


def test_a_sampler_with_which_each_group_trains_all_samples_is_named(changing_loops: list[dict[str, Any]]) -> None:
    for name, times in (("sampled inside", 2), ("sampled asks", 2), ("sampled before", 1)):
        one, other = (each[name] for each in changing_loops)
        assert sorted(one["seen"] + other["seen"]) == sorted([*range(16)] * times)
        assert other["said"] == []
        assert ["each of the 2 groups trains all samples" in each for each in one["said"]] == [True] * (times == 2)


def test_an_environment_variable_that_only_the_strategy_reads_is_named(changing_loops: list[dict[str, Any]]) -> None:
    one, other = (each["misplaced"] for each in changing_loops)
    assert other == []
    assert [each["spelled otherwise"] for each in changing_loops] == [[], []]
    assert one[0].startswith("LIGHTNING_OMNI_METHOD in the environment is read by OmniStrategy alone")


@pytest.mark.parametrize("groups", [1, 2])
def test_a_second_world_inside_a_loop_is_refused_and_the_loop_goes_on(
    changing_loops: list[dict[str, Any]], groups: int
) -> None:
    for each in changing_loops:
        assert each[f"inner, {groups}"].startswith("a second World while compute groups train")


def test_a_loop_of_another_world_inside_one_is_refused_and_worlds_are_freed_after_their_loops(
    changing_loops: list[dict[str, Any]],
) -> None:
    for each in changing_loops:
        apart, together, freed = each["nested"]
        assert "inside `with world.training():`, of this World or another one" in apart
        assert together == apart
        assert freed == [True, True]


@pytest.mark.parametrize(("kind", "least", "most"), [("SGD", 0.5, 0.95), ("Adagrad", 1.0, 1.5)])
def test_parameters_that_return_to_an_optimizer_have_the_state_with_which_they_left(
    changing_loops: list[dict[str, Any]], kind: str, least: float, most: float
) -> None:
    for each in changing_loops:
        assert least <= each[f"returned, {kind}"] <= most


def test_a_frozen_weight_that_a_group_writes_between_two_fetches_stays_as_it_is(
    changing_loops: list[dict[str, Any]],
) -> None:
    assert [each["target"] for each in changing_loops] == [[7.0] * 9, [8.0] * 9]


def test_an_optimizer_that_holds_its_parameters_in_another_order_on_one_rank_trains_each_as_the_others_do(
    changing_loops: list[dict[str, Any]],
) -> None:
    """Two layers are of one shape: without their names, each rank's first would be the other's second."""
    one, other = (each["unlike, an order"] for each in changing_loops)
    assert one == other
    assert one["wrapped"] == one["began"] != one["ended"]


@pytest.mark.parametrize("name", REGROUPED)
def test_after_regroup_a_module_that_is_not_wrapped_again_is_refused_and_one_that_is_trains(
    changing_loops: list[dict[str, Any]], name: str
) -> None:
    one, other = (each[name] for each in changing_loops)
    assert one["weights"] == other["weights"]
    for each in (one, other):
        kind = "ConfigurationError" if "2 groups" in name else "UnsupportedError"
        assert each["refused"].startswith(f"{kind} in step 3: ")
        assert "model = world.wrap(model)" in each["refused"]


def test_staleness_that_no_logger_asks_for_takes_no_more_memory_with_each_step(
    plain_loops: list[dict[str, Any]],
) -> None:
    for each in plain_loops:
        kinds, count = each["two groups"]["kept"]
        assert count == 40
        assert kinds < 40


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_or_optimizer_that_is_not_of_the_group_is_refused_in_the_first_step(
    plain_loops: list[dict[str, Any]], name: str
) -> None:
    for rank, each in enumerate(plain_loops):
        if name == "DDP of all ranks":
            assert f"whose process group has ranks of other compute groups ({1 - rank})" in each[name]
        elif name == "another World":
            assert "`with world.training():` of the World that the optimizer was made with" in each[name]
        else:
            assert "the members of this compute group have different gradients" in each[name]
        assert ("model = world.wrap(model)" in each[name]) == (name != "another World")


@pytest.fixture(scope="module")
def left_loops(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three ranks found in loops that members of a group leave alike, and that one leaves alone."""
    loops: dict[str, dict[str, Any]] = {
        "alike": {"caught": [0, 1, 2]},
        "alike again": {"caught": [0, 1, 2]},
        "alone": {"caught": [1]},
        "unlike": {"caught": [], "calls": True},
        "alike after one that ended unlike": {"caught": []},
        "late": {"steps": {"0": 4, "1": 4, "2": 4}},
        "met": {"met": {"0": 3.0, "1": 2.0, "2": 1.0}},
        "joined": {"joined": "join"},
        "nodes of two sizes": {"local": ["1", "2", "2"]},
        "hosts without torchrun": {"local": ["one", "two", "two"]},
        "hosts in turn": {"local": ["one", "two", "one"]},
        "without a speed": {"met": {"0": 3.0, "1": 2.0}},
        "early": {"steps": {"0": 40, "1": 6, "2": 5}},
    }
    return run_loops(tmp_path_factory.mktemp("left"), loops, ranks=3)


def test_joining_batches_of_different_number_is_refused_in_a_group_of_several(left_loops: list[dict[str, Any]]) -> None:
    """A member without further batches would wait in a collective of DDP, and the others in their exchange."""
    said = [each["joined"] for each in left_loops]
    assert said[0] == said[1] != said[2] == "a group of one"
    assert said[0].startswith("UnsupportedError: DistributedDataParallel.join() in a group of several: ")


def test_nodes_may_have_different_numbers_of_ranks_and_all_ranks_count_alike(left_loops: list[dict[str, Any]]) -> None:
    for each in left_loops:
        assert each["nodes of two sizes"] == each["hosts without torchrun"] == [1, 2]
        assert "the 3 ranks are not in the order of their hosts" in each["hosts in turn"]


def test_a_loop_that_is_interrupted_in_one_member_of_a_group_and_catches_it_keeps_no_rank_waiting(
    left_loops: list[dict[str, Any]],
) -> None:
    for each in left_loops:
        assert (each["alike"], each["alike again"]) == ("", "")
        assert "rank 1 was interrupted (Ctrl-C) after 6 steps and has left its loop" in each["alone"]
        assert "catch KeyboardInterrupt outside" in each["alone"]


def test_a_loop_after_one_that_failed_trains_although_the_script_still_holds_the_model_of_that_one(
    left_loops: list[dict[str, Any]],
) -> None:
    for each in left_loops:
        assert "called enter_world(module)" in each["unlike"]
        assert "called the end of training" in each["unlike"]
        assert each["alike after one that ended unlike"] == ""


def test_ranks_that_were_in_other_groups_before_train_as_one_and_leave_their_loop_together(
    left_loops: list[dict[str, Any]],
) -> None:
    assert [each["met"] for each in left_loops] == ["trained in the group [0, 1]"] * 2 + ["trained in the group [2]"]


def test_groups_by_speed_of_ranks_without_one_are_refused_by_name(left_loops: list[dict[str, Any]]) -> None:
    for each in left_loops:
        assert "World.regroup(speeds=) has no speed of rank 2" in each["without a speed"]


def test_a_group_whose_members_make_different_numbers_of_steps_ends_with_the_reason_and_others_go_on(
    left_loops: list[dict[str, Any]],
) -> None:
    assert [each["late"][0] for each in left_loops] == [[], [], []]
    for each in left_loops[1:]:
        assert "rank 2 has left its loop after 5 steps, and rank 1 waits for it in a further step" in each["early"]
        assert "must make the same number of steps" in each["early"]
    assert left_loops[0]["early"] == [[1, 2], 40]
