"""Calls of the hooks of callbacks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_omni.strategy.declared import callbacks_of

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
    from pytorch_lightning.loops.fit_loop import _FitLoop
    from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop

    _Trainer = Trainer
else:
    _EvaluationLoop = _FitLoop = _TrainingEpochLoop = _Trainer = object


def is_inside_hook(trainer: Trainer) -> bool:
    """Return whether Lightning is calling a hook of the module, a callback or the strategy now."""
    return trainer.lightning_module._current_fx_name is not None


def current_hook(trainer: Trainer) -> str:
    """Return the name of the hook that Lightning is calling; an empty string if there is none."""
    return trainer.lightning_module._current_fx_name or ""


def clear_current_hook(trainer: Trainer) -> None:
    """Clear the name of the current hook, which an earlier fit left behind if it was interrupted in a hook."""
    trainer.lightning_module._current_fx_name = None


def deciding_callbacks(trainer: Trainer) -> list[str]:
    """Return the state keys of callbacks that save, stop or tune; state keys include the callbacks' settings."""
    names = {"ModelCheckpoint", "EarlyStopping", "OmniTuner"}
    kinds = ((each, {kind.__name__ for kind in type(each).__mro__}) for each in callbacks_of(trainer))
    return [each.state_key for each, its in kinds if names & its]


def without_rank_zero_only(function: Callable[[str], None]) -> Callable[[str], None]:
    """Return the function that `rank_zero_only` decorates, for messages of other ranks."""
    plain: Callable[[str], None] = inspect.unwrap(function)
    return plain


_BEFORE_TRAINING = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start")


_FOR_RANK_ZERO = rank_zero_only(lambda: None).__code__  # every function that it decorates has this code


def call_rank_zero_hooks(trainer: Trainer) -> None:
    """Call the hooks before training that only rank 0 runs, on a rank that becomes rank 0 during the run.

    Later hooks may need their results, as in ThroughputMonitor.
    """
    module = trainer.lightning_module
    for name in _BEFORE_TRAINING:
        stage = {"stage": "fit"} if name == "setup" else {}
        with _inside_hook(module, name):
            for each in (*callbacks_of(trainer), module):
                hook: Any = getattr(each, name, None)
                if _is_for_rank_zero(hook):
                    hook(**stage) if each is module else hook(trainer, module, **stage)


def show_progress_bar(trainer: Trainer, is_in_epoch: bool) -> None:
    """Enable and start the progress bar on a rank that becomes rank 0 during the run, perhaps inside an epoch."""
    bar = trainer.progress_bar_callback
    if bar is None:
        return
    try:
        bar.enable()
    except NotImplementedError:  # the user's own bar was never disabled
        return
    bar.on_train_start(trainer, trainer.lightning_module)
    if is_in_epoch:
        bar.on_train_epoch_start(trainer, trainer.lightning_module)


def _is_for_rank_zero(function: Any) -> bool:
    """Return whether `rank_zero_only` decorates a function, perhaps under other decorators."""
    while function is not None and getattr(function, "__code__", None) is not _FOR_RANK_ZERO:
        function = getattr(function, "__wrapped__", None)
    return function is not None


class _CallbackRelay:
    """A replacement for the function by which Lightning calls callbacks; it calls a listener first."""

    def __init__(self, call_callbacks: Callable[..., None]) -> None:
        self.call_callbacks = call_callbacks
        self.listeners: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.held_back: WeakKeyDictionary[Any, Collection[str]] = WeakKeyDictionary()

    def __call__(
        self, trainer: Trainer, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
    ) -> None:
        hook = getattr(self.listeners.get(trainer), hook_name, None)
        if hook is not None and monitoring_callbacks is not True:  # Lightning calls those in a second round
            with _inside_hook(trainer.lightning_module, hook_name):
                hook(trainer, trainer.lightning_module, *args, **kwargs)
        if hook_name in self.held_back.get(trainer, ()):
            return
        self.call_callbacks(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)


@contextmanager
def _inside_hook(module: LightningModule, name: str) -> Iterator[None]:
    """Return a context in which ``module.log`` is called in the hook of this name."""
    before, module._current_fx_name = module._current_fx_name, name
    try:
        yield
    finally:
        module._current_fx_name = before


def call_module(trainer: Trainer) -> Any:
    """Return the module of the Trainer's own namespace through which its loops call hooks."""
    own = next(kind for kind in type(trainer).__mro__ if kind.__module__.endswith("trainer.trainer"))
    return sys.modules[own.__module__.removesuffix("trainer") + "call"]


def add_listener(trainer: Trainer, listener: Any) -> None:
    """Call the listener's methods of the same name before any callback's hooks, from now on.

    The listener need not be in ``trainer.callbacks``.
    """
    calls = call_module(trainer)
    if not isinstance(calls._call_callback_hooks, _CallbackRelay):
        calls._call_callback_hooks = _CallbackRelay(calls._call_callback_hooks)
    calls._call_callback_hooks.listeners[trainer] = listener


def remove_listener(trainer: Trainer) -> None:
    """Undo `add_listener`."""
    calls = call_module(trainer)
    relay = calls._call_callback_hooks
    if isinstance(relay, _CallbackRelay):
        relay.listeners.pop(trainer, None)
        if not relay.listeners:
            calls._call_callback_hooks = relay.call_callbacks
