"""`tune_device`: what it keeps, refuses and proposes, in virtual seconds; and that it leaves everything as it was."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.device import DeviceReport, DeviceSetting, Finding, tune_device
from lightning_omni.tuning.device.setting import align_layouts, can_keep_memory, contiguous, keep_memory
from lightning_omni.tuning.device.trial import Comparison, TrainingSetup, Trial, agreement, compare, distance
from lightning_omni.tuning.trainer import arguments_of

NO_COMPILE = {"compile": "a test"}
STEPS = ("compile", "allocator", "memory format")
LAST = torch.channels_last


class Net(nn.Module):
    """Convolution, normalisation, rng."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.drop(self.norm(self.conv(x)).relu()).mean((2, 3)))
        return logits


def loss_of(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def batches(size: int = 8, count: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 3, 6, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def net(dropout: float = 0.0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(dropout)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class VirtualTime:
    """A clock that only a model's steps move, by what they are said to cost."""

    def __init__(self, cost: Callable[[Any, Any], float], loss: Callable[[Any, Any], Tensor] = loss_of) -> None:
        self.cost, self.now, self._loss = cost, 0.0, loss

    def clock(self) -> float:
        return self.now

    def loss(self, model: Any, batch: Any) -> Tensor:
        self.now += self.cost(model, batch)
        return self._loss(model, batch)


def only(*steps: str) -> dict[str, str]:
    """Skips the other steps, which cost time and are not what a test is about."""
    return {step: "a test" for step in STEPS if step not in steps}


def is_last(model: Any) -> bool:
    return bool(model.conv.weight.is_contiguous(memory_format=LAST))


def tuned(cost: Callable[[Any, Any], float], dropout: float = 0.0, **options: Any) -> DeviceReport:
    """A report in virtual time, of what costs what it is said to cost."""
    model, optimizer = net(dropout)
    world = VirtualTime(cost)
    given = {"budget": 1e4, "bf16": "skip", "skip": NO_COMPILE, "loss": world.loss, **options}
    loss = given.pop("loss")
    return tune_device(model, loss, optimizer, batches(), clock=world.clock, **given)


def finding(report: DeviceReport, step: str) -> Finding:
    [found] = [each for each in report.findings if each.step == step]
    return found


# --- Everything is as it was ------------------------------------------------------------------------------------------


def digest(*things: Any) -> str:
    """All bits of tensors, modes and plain values."""
    hasher = hashlib.sha256()

    def add(thing: Any) -> None:
        if isinstance(thing, Tensor):
            hasher.update(repr((thing.dtype, thing.shape, thing.stride(), thing.requires_grad)).encode())
            hasher.update(thing.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(thing, np.ndarray):
            hasher.update(thing.tobytes())
        elif isinstance(thing, dict):
            for key, value in thing.items():
                hasher.update(repr(key).encode())
                add(value)
        elif isinstance(thing, (list, tuple)):
            for each in thing:
                add(each)
        else:
            hasher.update(repr(thing).encode())

    add(things)
    return hasher.hexdigest()


def all_of(model: nn.Module, optimizer: torch.optim.Optimizer, given: Any) -> str:
    return digest(
        dict(model.named_parameters()),
        dict(model.named_buffers()),
        [parameter.grad for parameter in model.parameters()],
        [module.training for module in model.modules()],
        [module._compiled_call_impl is None for module in model.modules()],
        optimizer.state_dict(),
        given,
        torch.get_rng_state(),
        repr(random.getstate()),
        list(np.random.get_state()),  # noqa: NPY002
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_float32_matmul_precision(),
    )


def trained(dropout: float = 0.3) -> tuple[Net, torch.optim.Optimizer]:
    """With momentum, gradients, counted batches, and a part that is frozen."""
    model, optimizer = net(dropout)
    for batch in batches():
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    model.norm.eval()
    return model, optimizer


def writing_loss(model: Any, batch: Any) -> Tensor:
    random.random(), np.random.rand()  # noqa: NPY002
    batch[0].mul_(0.99)
    return loss_of(model, batch)


def test_everything_is_afterwards_as_it_was_to_the_bit() -> None:
    model, optimizer = trained()
    given = batches()
    world = VirtualTime(lambda model, batch: 1.0 if is_last(model) else 1.2, writing_loss)
    before = all_of(model, optimizer, given)
    with torch.no_grad():
        report = tune_device(
            model,
            world.loss,
            optimizer,
            given,
            bf16="apply",
            budget=1e4,
            skip=NO_COMPILE,
            clock=world.clock,
        )
        assert not torch.is_grad_enabled()
    assert len(report.findings) >= 3
    assert all_of(model, optimizer, given) == before


def test_after_ctrl_c_everything_is_as_it_was() -> None:
    model, optimizer = trained()
    given = batches()
    before = all_of(model, optimizer, given)

    def interrupted(model: Any, batch: Any) -> Tensor:
        if is_last(model):
            raise KeyboardInterrupt
        return writing_loss(model, batch)

    with pytest.raises(KeyboardInterrupt):
        tune_device(model, interrupted, optimizer, given, budget=20, skip=only("memory format"))
    assert all_of(model, optimizer, given) == before


def test_what_is_applied_can_be_undone() -> None:
    model, optimizer = trained()
    before = all_of(model, optimizer, None)
    setting = DeviceSetting(keep_memory=True, channels_last=True)
    applied = setting.apply(model, optimizer)
    assert is_last(model)
    assert optimizer.state[model.conv.weight]["momentum_buffer"].is_contiguous(memory_format=LAST)
    assert all_of(model, optimizer, None) != before
    applied.undo()
    applied.undo()
    assert all_of(model, optimizer, None) == before


def test_a_setting_that_cannot_be_applied_changes_nothing() -> None:
    model, optimizer = trained()
    before = all_of(model, optimizer, None)
    with pytest.raises(ConfigurationError, match=r"compiled=\('absent',\): .* has no submodule 'absent'"):
        DeviceSetting(channels_last=True, compiled=("absent",)).apply(model, optimizer)
    assert all_of(model, optimizer, None) == before


def test_the_names_of_compiled_submodules_are_a_tuple() -> None:
    assert DeviceSetting(compiled=["net"]) == DeviceSetting(compiled=("net",))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="compiled='net': pass names of submodules"):
        DeviceSetting(compiled="net")  # type: ignore[arg-type]


# --- What is kept and what is not -------------------------------------------------------------------------------------


def test_a_faster_memory_format_is_applied_and_its_gain_is_the_ratio() -> None:
    report = tuned(lambda model, batch: 1.0 if is_last(model) else 2.0)
    found = finding(report, "memory format")
    assert (found.verdict, found.after, found.gain, found.spread) == ("applied", 8.0, 2.0, (2.0, 2.0))
    assert report.setting == DeviceSetting(channels_last=True)
    assert (report.baseline, report.tuned, report.gain) == (4.0, 8.0, 2.0)


def test_a_slow_candidate_is_rejected() -> None:
    report = tuned(lambda model, batch: 3.0 if is_last(model) else 2.0)
    found = finding(report, "memory format")
    assert (found.verdict, found.reason) == ("rejected", "slower")
    assert found.gain == pytest.approx(2 / 3)
    assert report.setting == DeviceSetting()
    assert report.gain is None


def test_a_gain_within_the_margin_is_rejected() -> None:
    report = tuned(lambda model, batch: 1.0 if is_last(model) else 1.02, skip=only("memory format"))
    found = finding(report, "memory format")
    assert (found.verdict, report.gain) == ("rejected", None)
    assert "no gain of 3%" in found.reason


def test_gains_are_measured_beside_the_best_and_together_beside_what_it_was() -> None:
    def cost(model: Any, batch: Any) -> float:
        return (1.0 if is_last(model) else 2.0) * (1.0 if torch.is_autocast_enabled("cpu") else 1.5)

    report = tuned(cost, bf16="apply", skip=only("memory format"))
    gains = [each.gain for each in report.findings if each.verdict == "applied"]
    assert gains == [pytest.approx(1.5), pytest.approx(2.0)]
    assert report.gain == pytest.approx(3.0)


def test_what_is_slower_than_the_defaults_in_the_last_comparison_is_not_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comparisons: list[Any] = []

    def compared(*given: Any, **options: Any) -> Any:
        comparisons.append(given)
        return compare(*given, **options)

    def cost(model: Any, batch: Any) -> float:
        return 1.0 if is_last(model) is not (len(comparisons) > 1) else 2.0

    monkeypatch.setattr("lightning_omni.tuning.device.tune.compare", compared)
    report = tuned(cost, skip=only("memory format"))
    found = finding(report, "memory format")
    assert (found.gain, found.verdict, found.reason) == (2.0, "rejected", "slower than the defaults in the end")
    assert report.setting == DeviceSetting()
    assert (report.gain, report.tuned) == (None, report.baseline)


def test_noise_that_the_pairs_do_not_agree_on_is_rejected() -> None:
    rng = random.Random(0)
    found = finding(tuned(lambda model, batch: rng.uniform(0.5, 1.5), skip=only("memory format")), "memory format")
    assert found.verdict == "rejected"


def test_a_candidate_that_fails_is_rejected_with_its_reason() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), _View(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters())
    report = tune_device(model, loss_of, optimizer, batches(), budget=5, bf16="skip", skip=only("memory format"))
    found = finding(report, "memory format")
    assert found.verdict == "rejected"
    assert "RuntimeError: view size is not compatible" in found.reason


class _View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


def test_a_candidate_without_memory_is_rejected_and_the_search_goes_on() -> None:
    def cost(model: Any, batch: Any) -> float:
        if is_last(model):
            raise torch.OutOfMemoryError("no memory")
        return 1.0

    report = tuned(cost, bf16="propose")
    assert finding(report, "memory format").reason == "OutOfMemoryError: no memory"
    assert finding(report, "precision").verdict == "rejected"


def test_a_candidate_that_computes_something_else_is_rejected() -> None:
    world = VirtualTime(lambda model, batch: 1.0 if is_last(model) else 2.0)
    model, optimizer = net()

    def loss(model: Any, batch: Any) -> Tensor:
        return world.loss(model, batch) * (1.1 if is_last(model) else 1.0)

    skip = only("memory format")
    report = tune_device(model, loss, optimizer, batches(), bf16="skip", skip=skip, budget=1e4, clock=world.clock)
    assert "it computes something else: a loss of" in finding(report, "memory format").reason


def test_with_dropout_a_layout_may_draw_other_masks() -> None:
    report = tuned(lambda model, batch: 1.0 if is_last(model) else 2.0, dropout=0.5, skip=only("memory format"))
    assert finding(report, "memory format").verdict == "applied"


def test_the_budget_is_kept() -> None:
    report = tuned(lambda model, batch: 1.0, budget=40.0, bf16="propose")
    assert report.seconds <= 40 + 5
    assert finding(report, "precision").reason == "the budget of 40 s is used up"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of torch's scripts
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")  # to users of it
def test_a_sequential_is_compiled_as_a_whole_and_the_compilation_is_not_counted() -> None:
    world = VirtualTime(lambda model, batch: 0.5 if model._compiled_call_impl is not None else 1.0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = [(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))]
    report = tune_device(model, world.loss, optimizer, given, budget=1e4, bf16="skip", clock=world.clock)
    assert finding(report, "compile").tried == "model"
    assert report.setting.compiled == ("",)
    assert finding(report, "compile").gain == 2.0
    assert model._compiled_call_impl is None


# --- What changes the statistics --------------------------------------------------------------------------------------


def in_bf16(model: Any, batch: Any) -> float:
    return 1.0 if torch.is_autocast_enabled("cpu") else 2.0


def test_precision_is_proposed_and_applied_only_if_allowed() -> None:
    proposed = tuned(in_bf16, bf16="propose", skip=only())
    assert not proposed.setting.bf16
    assert finding(proposed, "precision").verdict == "proposed"
    assert proposed.gain is None
    allowed = tuned(in_bf16, bf16="apply", skip=only())
    assert allowed.setting == DeviceSetting(bf16=True)
    assert allowed.gain == 2.0
    assert "losses differ by" in finding(allowed, "precision").reason


def test_precision_is_applied_with_an_unlimited_budget() -> None:
    assert tuned(in_bf16, bf16="apply", skip=only(), budget=math.inf).setting == DeviceSetting(bf16=True)


def test_a_model_that_bfloat16_visibly_changes_is_refused_whatever_the_gain() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.bias.fill_(300.0)  # of which bfloat16 has multiples of two
    world = VirtualTime(in_bf16)
    given = [(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def measured(tolerance: float) -> Finding:
        options: dict[str, Any] = {"bf16": "apply", "budget": 1e4, "skip": only()}
        report = tune_device(model, world.loss, optimizer, given, clock=world.clock, tolerance=tolerance, **options)
        assert report.setting.bf16 == (finding(report, "precision").verdict == "applied")
        return finding(report, "precision")

    strict, lax = measured(0.02), measured(10.0)
    assert strict.verdict == "rejected"
    assert "(tolerated 2.00%" in strict.reason
    assert strict.gain == 2.0
    assert lax.verdict == "applied"


def test_curves_agree_within_the_tolerance_and_rounding() -> None:
    curve = [2.0, 1.0, 1.0]
    assert distance(curve, curve) == 0
    assert distance(curve, [2.0, 1.0, float("nan")]) == float("inf")
    assert agreement(curve, [2.0, 1.0, 1.07], curve)[0]
    assert not agreement(curve, [2.0, 1.0, 1.09], curve)[0]
    assert agreement(curve, [2.0, 1.0, 1.09], [2.0, 1.0, 1.05])[0]
    agrees, words = agreement(curve, curve, [2.0, 1.0, 2.0])
    assert not agrees
    assert "cannot be judged" in words


# --- What is told -----------------------------------------------------------------------------------------------------


def compared(low: float, high: float) -> Finding:
    return Finding("step", "tried", "rejected", gain=(low + high) / 2, spread=(low, high))


def test_nothing_is_said_to_be_no_faster_that_the_budget_had_no_time_for() -> None:
    skipped = Finding("memory format", "channels_last", "skipped", "the budget of 5 s is used up")
    for findings, said in (
        ((skipped,), "nothing was compared with them"),
        ((skipped, compared(0.8, 0.9)), "nothing faster was found"),
    ):
        stays = DeviceReport(findings, DeviceSetting(), 1.0, 1.0, None, 32)
        assert stays.summary == f"1 samples/s with the defaults; {said}"


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    file = io.StringIO()
    setting = DeviceSetting(channels_last=True)
    made = DeviceReport((compared(0.8, 1.3),) * 2, setting, 1.0, 2.0, 2.0, 32, spread=(0.7, 2.1))
    Console(width=80, file=file).print(made.table())
    assert "0.80–1.30" in file.getvalue()
    assert max(map(len, file.getvalue().splitlines())) <= 80
    assert "2.00 times, 0.70 to 2.10" in made.summary


# --- The parts --------------------------------------------------------------------------------------------------------


class Paced:
    """Takes the seconds that it is told."""

    samples = 10

    def __init__(self, world: VirtualTime, *seconds: float) -> None:
        self.world, self.seconds, self.runs = world, list(seconds), 0

    def run(self, steps: int) -> float:
        seconds = steps * self.seconds[self.runs % len(self.seconds)]
        self.runs += 1
        self.world.now += seconds
        return seconds


def paced(world: VirtualTime, *seconds: float) -> Any:
    return Paced(world, *seconds)


def test_pairs_are_timed_alternately_and_end_when_the_difference_is_clear() -> None:
    world = VirtualTime(lambda model, batch: 0)
    found = compare(paced(world, 2.0), paced(world, 1.0), 1e9, world.clock)
    assert (found.ratios, found.is_faster, found.is_clear) == ((2.0, 2.0, 2.0), True, True)
    found = compare(paced(world, 1.0, 2.0), paced(world, 1.1, 1.0), 1e9, world.clock)
    assert len(found.ratios) == 7
    assert not found.is_clear
    assert not compare(paced(world, 2.0), paced(world, 1.0), world.now + 4, world.clock).is_faster, "two pairs only"
    assert not Comparison((), ()).is_faster


def test_short_steps_are_timed_in_blocks() -> None:
    world = VirtualTime(lambda model, batch: 0)
    before = paced(world, 0.004)
    found = compare(before, paced(world, 0.002), 1e9, world.clock)
    assert found.gain == 2.0
    assert world.now == pytest.approx(0.006 + 3 * 50 * 0.006)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_fused_steps_on_channels_last_weights_are_right_whatever_the_layout_of_their_state(kind: Any) -> None:
    def weights(setting: DeviceSetting) -> Tensor:
        torch.manual_seed(0)
        model = Net()
        momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(model.parameters(), lr=0.1, fused=True, **momentum)
        loss_of(model, batches()[0]).backward()
        optimizer.step()
        setting.apply(model, optimizer)
        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, batches()[0]).backward()
            if number == 1:  # from a network, or a checkpoint
                parameter = model.conv.weight
                parameter.grad = contiguous(parameter.grad)
                optimizer.load_state_dict(contiguous(optimizer.state_dict()))
                assert not setting.channels_last or parameter.grad.stride() != parameter.stride()
            optimizer.step()
        return model.conv.weight.detach()

    torch.testing.assert_close(weights(DeviceSetting(channels_last=True)), weights(DeviceSetting()))


def test_layouts_that_agree_are_left_alone() -> None:
    model, optimizer = trained()
    gradients = [parameter.grad for parameter in model.parameters()]
    align_layouts(optimizer)
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), gradients, strict=True))


@pytest.mark.skipif(not can_keep_memory(), reason="glibc only")
def test_keeping_memory_changes_no_bit() -> None:
    def weights(setting: DeviceSetting) -> str:
        model, optimizer = net()
        applied = setting.apply(model, optimizer)
        for batch in batches(256, 3):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        applied.undo()
        return digest(list(model.parameters()))

    assert weights(DeviceSetting(keep_memory=True)) == weights(DeviceSetting())


@pytest.mark.skipif(not can_keep_memory(), reason="glibc only")
def test_kept_memory_is_handed_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    try:
        keep_memory(True)
        tensor = torch.ones(64 * 2**20)
        del tensor
        kept = resident()
    finally:
        keep_memory(False)
    assert kept - resident() > 200 * 2**20


def test_a_report_survives_json_and_can_be_shown() -> None:
    report = tuned(in_bf16, bf16="propose", skip=only("memory format"))
    assert DeviceReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert report.table().row_count == len(report.findings)


def test_a_training_step_is_given_the_batchs_number_where_lightning_gives_it() -> None:
    def usual(self: Any, batch: Any, batch_idx: int) -> None: ...
    def short(self: Any, batch: Any) -> None: ...
    def keywords(self: Any, batch: Any, **options: Any) -> None: ...
    def by_name(self: Any, batch: Any, *, scale: float = 1.0) -> None: ...
    def all_of_them(self: Any, *arguments: Any, **options: Any) -> None: ...
    def wide(self: Any, batch: Any, *arguments: Any) -> None: ...

    for step in (usual, short, keywords, by_name, all_of_them, wide):
        passed = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        assert arguments_of(step) == ((0,) if passed else ()), step.__name__


@pytest.mark.parametrize(
    "setting", [DeviceSetting(), DeviceSetting(channels_last=True)], ids=["usual", "channels_last"]
)
def test_each_probe_begins_with_the_state_that_the_optimizer_has(setting: DeviceSetting) -> None:
    model, optimizer = trained()
    trial = Trial(TrainingSetup(model, loss_of, optimizer, batches()), setting)
    first = trial.losses(4)
    trial.run(3)
    assert trial.losses(4) == first
    fresh = Trial(TrainingSetup(model, loss_of, torch.optim.SGD(model.parameters(), 0.05, 0.9), batches()), setting)
    assert fresh.losses(4) != first


def test_an_optimizer_may_be_made_by_a_function_or_be_of_ones_own() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, parameters: Any, secret: list[float]) -> None:
            super().__init__(parameters, lr=0.1)
            self.secret = secret

        def step(self, closure: Any = None) -> Any:
            self.secret.append(self.secret[-1] + 1)
            return super().step(closure)

    model = Net()
    optimizer = Own(model.parameters(), [0.0])
    options: dict[str, Any] = {"budget": 0.5, "bf16": "skip", "skip": only("memory format")}
    for given in (optimizer, torch.optim.AdamW):
        report = tune_device(model, loss_of, given, batches(), **options)
        assert finding(report, "memory format").tried == "channels_last"
    assert optimizer.secret == [0.0]


def test_wrong_arguments_are_told() -> None:
    model, optimizer = net()

    def said(loss: Any = loss_of, given: Any = None, **options: Any) -> str:
        with pytest.raises(ConfigurationError) as error:
            tune_device(model, loss, optimizer, batches() if given is None else given, **options)
        return str(error.value)

    assert 'bf16=\'allow\': pass "apply", "propose" or "skip"' in said(bf16="allow")
    assert "budget=0: pass seconds above 0" in said(budget=0)
    assert "tolerance=0: pass a fraction above 0" in said(tolerance=0)
    assert "batches: pass at least one" in said(given=[])
    assert "batches: pass at least one" in said(given=[{"name": "x"}])
    assert "cannot be trained with the defaults: RuntimeError" in said(
        given=[(torch.zeros(2, 5, 6, 6), torch.zeros(2).long())]
    )
    assert "does not depend on the copy's weights" in said(lambda other, batch: loss_of(model, batch))
    assert all(parameter.grad is None for parameter in model.parameters())


# --- Processes --------------------------------------------------------------------------------------------------------
