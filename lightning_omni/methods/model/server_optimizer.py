"""The master weights of one optimizer, and the user's torch optimizer that moves them.

A torch optimizer reaches the server as a *description*: class path, defaults, parameter groups, plain attributes. It is
never pickled, so a message cannot execute its sender's code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from numbers import Real
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_omni.errors import MalformedMessage, OmniError, UnsupportedError
from lightning_omni.methods.model.fragments import cut, read, sizes_of
from lightning_omni.methods.model.modules import admitting, class_path

_MAY_BE_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")
_NOT_SETTINGS = ("params", "param_names", *_IMPLEMENTATION_FLAGS)
"""Keys of a parameter group that are no hyperparameters."""
_PLAIN = (bool, int, float, str, bytes, type(None))
_STEP_ON_RANKS = 'use a method whose optimizer steps on the ranks (method="local_sgd", say), or groups=1'

Resolve = Callable[[str], type[Optimizer]]


class Master:
    """Master weights, their optimizer, and their clock: one tick for each applied update.

    Args:
        parameters: every parameter that the optimizer moves, by name; used in place.
        optimizer: the user's optimizer over exactly these parameters; None if the workers' own optimizers step.
        clock: number of updates that the values already contain.
        first: number of parameters before any were added; None for all.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        optimizer: Optimizer | None,
        clock: int = 0,
        first: int | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.optimizer = optimizer
        self.clock = clock
        self._ordered = list(self.parameters.values())
        self._first = len(self._ordered) if first is None else first
        self._fragments = [self._ordered]
        self._detached: dict[Tensor, Any] = {}
        self._has_checked_state = False
        self._kept_settings: set[str] = set()

    def grow(self, parameters: Mapping[str, Parameter]) -> None:
        """Append parameters, which no parameter group holds yet."""
        self.parameters.update(parameters)
        self._ordered = list(self.parameters.values())
        before = self._fragments
        self.cut(len(before))
        for old, new in zip(before, self._fragments, strict=True) if len(before) > 1 else ():
            for mine, moved in zip(old, new, strict=False):  # optimizers hold the pieces: keep these objects
                mine.data = moved.data
            new[: len(old)] = old

    def cut(self, fragments: int) -> None:
        """Cut the parameters into fragments, for `fragment`."""
        if fragments == 1:
            self._fragments = [self._ordered]
            return
        weights = self.weights()
        self._fragments = [
            [Parameter(piece, requires_grad=piece.is_floating_point()) for piece in read(weights, pieces)]
            for pieces in cut(sizes_of(weights), fragments, self._first)
        ]

    def fragment(self, number: int | None) -> list[Parameter]:
        """Return the pieces of a fragment, which share the parameters' memory; None for the parameters themselves."""
        return self._ordered if number is None else self._fragments[number]

    def arrange(self, groups: Sequence[Mapping[str, Any]], state: Mapping[int, Any] | None = None) -> None:
        """Replace the optimizer's parameter groups; state stays with its parameter.

        Args:
            groups: settings, with parameter indices under ``params``.
            state: optimizer state by parameter index, for parameters that have none.
        """
        assert self.optimizer is not None
        before = self.optimizer.param_groups
        self.optimizer.param_groups = []
        try:
            for group in groups:
                self.optimizer.add_param_group({**group, "params": [self._ordered[place] for place in group["params"]]})
        except BaseException:
            self.optimizer.param_groups = before
            raise
        _choose_fastest_kernel(self.optimizer)
        detach_state(self.optimizer, self._detached)
        for place, values in (state or {}).items():
            self.optimizer.state.setdefault(self._ordered[place], dict(values))

    def update(
        self,
        gradients: Sequence[Tensor | None],
        hyperparameters: Sequence[Mapping[str, Any]],
        step_scale: float = 1.0,
    ) -> None:
        """Make one step of the user's optimizer: ``weights, clock = step(weights, gradients), clock + 1``.

        Args:
            gradients: one for each parameter; None skips it as torch does (no weight decay, no momentum).
            hyperparameters: one mapping for each parameter group, which replaces the optimizer's own.
            step_scale: factor of the learning rate, for this step.
        """
        assert self.optimizer is not None, "this method's optimizer runs at the workers"
        left_out = {*_NOT_SETTINGS, *self._kept_settings}
        given = [{key: value for key, value in of.items() if key not in left_out} for of in hyperparameters]
        for group, values in zip(self.optimizer.param_groups, given, strict=True):
            group.update(values)
            if step_scale != 1.0:
                group["lr"] = values["lr"] = rate_of(self.optimizer, group) * step_scale
        self.step(self.optimizer, gradients)
        self._check_kept(given)

    def _check_kept(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Raise `UnsupportedError` if a step keeps state where it is lost; let it change settings without defaults."""
        assert self.optimizer is not None
        kind = type(self.optimizer)
        for group, given in zip(self.optimizer.param_groups, settings, strict=True):
            for key, value in given.items():
                if key in group and (group[key] is value or group[key] == value):
                    continue
                # For example a count of steps, which ranks have from training in one group.
                if key not in self.optimizer.defaults:
                    self._kept_settings.add(key)
                else:
                    raise UnsupportedError(
                        f"{kind.__qualname__} cannot run at the parameter server: its step() has changed {key!r} of a"
                        f" parameter group, and each push brings the value that the ranks have; {_STEP_ON_RANKS}"
                    )
        for owner, values in () if self._has_checked_state else self.optimizer.state.items():
            if not isinstance(owner, Tensor):
                raise UnsupportedError(
                    f"{kind.__qualname__} cannot run at the parameter server: its state {owner!r} is that of no"
                    f" parameter, and would be in no checkpoint; {_STEP_ON_RANKS}"
                )
            for key, value in values.items():
                without_tensors = tree_map(lambda leaf: None if isinstance(leaf, Tensor) else leaf, value)
                _checked(kind, "its state", key, without_tensors)
        self._has_checked_state = bool(self.optimizer.state)

    def step(self, optimizer: Optimizer, gradients: Sequence[Tensor | None], fragment: int | None = None) -> None:
        """Make one step of any optimizer over the parameters or a fragment; the clock ticks."""
        parameters = self.fragment(fragment)
        pairs = [(p, gradient) for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        for some in _steppable_together(optimizer, pairs):
            for parameter, gradient in some:
                parameter.grad = gradient
            try:
                optimizer.step()
            except Exception as error:
                raise OmniError(
                    f"{type(optimizer).__qualname__}.step(), which the parameter server calls without a closure,"
                    f" failed: {type(error).__name__}: {error}; {_STEP_ON_RANKS}"
                ) from error
            finally:
                for parameter, _ in some:
                    parameter.grad = None
        self.clock += 1

    def overwrite(self, values: Sequence[Tensor | None], fragment: int | None = None) -> None:
        """Set ``weights, clock = values, clock + 1``; a weight whose value is None stays."""
        for weight, value in zip(self.weights(fragment), values, strict=True):
            if value is not None:
                weight.copy_(value)
        self.clock += 1

    def add(self, changes: Sequence[Tensor | None], factor: float = 1.0, fragment: int | None = None) -> None:
        """Set ``weights, clock = weights + factor * changes, clock + 1``, for all parameters or a fragment."""
        for weight, change in zip(self.weights(fragment), changes, strict=True):
            if change is not None:
                weight.add_(change, alpha=factor)
        self.clock += 1

    def weights(self, fragment: int | None = None) -> list[Tensor]:
        """Return the live weights, in order, or a fragment's pieces of them; updates change them in place."""
        return [parameter.detach() for parameter in self.fragment(fragment)]

    def snapshot(self) -> dict[str, Any]:
        """Return weights, optimizer state and clock after the same update. The tensors are live."""
        return {
            "weights": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "state": self._state() if self.optimizer is not None else {},
            "clock": self.clock,
        }

    def _state(self) -> dict[Any, Any]:
        assert self.optimizer is not None
        places = {id(parameter): place for place, parameter in enumerate(self._ordered)}
        held = [id(parameter) for parameter in held_by(self.optimizer)]
        state = self.optimizer.state_dict()["state"]
        return {places[held[key]] if isinstance(key, int) else key: value for key, value in state.items()}


def check_state(optimizer: Optimizer, weights: Mapping[int, Tensor], state: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise `MalformedMessage` unless a copy of the optimizer can step copies of these weights with this state."""
    for key, values in state.items():  # fused kernels do not check shapes before they write
        wrong = [
            name
            for name, value in values.items()
            if isinstance(value, Tensor) and value.numel() != 1 and value.shape != weights[key].shape
        ]
        if wrong and type(optimizer) in _MAY_BE_FUSED:
            raise MalformedMessage(f"optimizer state {wrong[0]} has another shape than its weight")
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)
    tried = {key: Parameter(weight.clone()) for key, weight in weights.items()}
    plain = {flag: False for flag in _IMPLEMENTATION_FLAGS if flag in optimizer.param_groups[0]}
    twin.param_groups = [{**optimizer.param_groups[0], **plain, "params": list(tried.values())}]
    twin.state = defaultdict(dict)
    for key, parameter in tried.items():
        twin.state[parameter] = {
            name: value.clone() if isinstance(value, Tensor) else value for name, value in state[key].items()
        }
        parameter.grad = torch.zeros_like(parameter)
    try:
        twin.step()
    except Exception as error:  # torch raises exceptions of many types
        raise MalformedMessage(
            f"optimizer state that {type(optimizer).__name__} cannot step with: {type(error).__name__}: {error}"
        ) from error


def detach_state(optimizer: Optimizer, detached: dict[Tensor, Any]) -> None:
    """Stash the state of parameters that no parameter group holds, and restore that of those that returned.

    ``state_dict()`` would fail on the stashed state.
    """
    held = set(held_by(optimizer))
    for parameter in [each for each in optimizer.state if isinstance(each, Tensor) and each not in held]:
        detached[parameter] = optimizer.state.pop(parameter)
    for parameter in held & detached.keys():
        before = detached.pop(parameter)
        if not optimizer.state.get(parameter):
            optimizer.state[parameter] = before


def hyperparameters_of(
    optimizer: Optimizer, of: Container[Tensor] | None = None, are_needed: bool = True
) -> list[dict[str, Any]]:
    """Return the hyperparameters of each parameter group as plain values.

    With ``of``, only groups that hold some of these parameters, or are empty, are returned. Values that are not plain
    raise `UnsupportedError` if they ``are_needed``, and are left out otherwise.
    """
    kind = type(optimizer)
    groups = [group for group in optimizer.param_groups if of is None or holds(group, of)]
    known = _read_from_devices(value for group in groups for value in group.values())
    return [
        {
            key: value
            if type(value) in _PLAIN
            else _checked(kind, "a parameter group's", key, known.get(id(value), value))
            for key, value in group.items()
            if key not in _NOT_SETTINGS and (are_needed or id(value) in known or _is_plain(value))
        }
        for group in groups
    ]


def _read_from_devices(values: Iterable[Any]) -> dict[int, Any]:
    """Return the numbers of one-element tensors on a device, by ``id``; those of one dtype in one copy."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in values:
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_cpu:
            alike.setdefault((value.device, value.dtype), []).append(value)
    return {
        id(tensor): number
        for tensors in alike.values()
        for tensor, number in zip(
            tensors, torch.cat([tensor.detach().reshape(1) for tensor in tensors]).tolist(), strict=True
        )
    }


def set_hyperparameter(group: dict[str, Any], name: str, value: Any) -> None:
    """Set a hyperparameter; a tensor, which a compiled optimizer reads, keeps its storage.

    Example:
        >>> group = {"lr": torch.tensor(0.1), "momentum": 0.9}
        >>> set_hyperparameter(group, "lr", 0.5)
        >>> set_hyperparameter(group, "momentum", 0.0)
        >>> group
        {'lr': tensor(0.5000), 'momentum': 0.0}
    """
    if isinstance(group[name], Tensor):
        group[name].fill_(value.squeeze() if isinstance(value, Tensor) else value)
    else:
        group[name] = value


@contextmanager
def scaled_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rates of all parameter groups in this context."""
    groups = [group for group in optimizer.param_groups if factor != 1.0 and group.get("lr") is not None]
    own = [deepcopy(group["lr"]) for group in groups]  # groups may share a tensor
    for group, rate in zip(groups, own, strict=True):
        set_hyperparameter(group, "lr", rate * factor)
    try:
        yield
    finally:
        for group, rate in zip(groups, own, strict=True):
            set_hyperparameter(group, "lr", rate)


def describe(optimizer: Optimizer, names: Mapping[Tensor, str], with_state: bool = True) -> dict[str, Any]:
    """Describe a torch optimizer, whose ``step`` needs no closure, so that `rebuild` can copy it in another process.

    ``names`` are those of the parameters that the copy is to move.
    """
    check_servable(optimizer)
    marks = {} if type(optimizer).__module__.startswith("torch.optim.") else _marks_of(names)
    return {
        **({"parameters": marks} if marks else {}),
        "class": class_path(type(optimizer)),
        "defaults": {key: _plain(value) for key, value in optimizer.defaults.items()},
        "attributes": {key: _plain(value) for key, value in attributes_of(optimizer).items()},
        "groups": [
            {**values, "params": [names[parameter] for parameter in group["params"] if parameter in names]}
            for group, values in zip(optimizer.param_groups, hyperparameters_of(optimizer), strict=True)
            if holds(group, names)
        ],
        "state": state_of(optimizer, names) if with_state else {},
    }


def _marks_of(names: Mapping[Tensor, str]) -> dict[str, dict[str, Any]]:
    marks = {
        name: {key: value for key, value in vars(parameter).items() if _is_mark(key, value)}
        for parameter, name in names.items()
    }
    return {name: values for name, values in marks.items() if values}


def _is_mark(name: str, value: Any) -> bool:
    is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)
    return (value is None or is_number or isinstance(value, str)) and not hasattr(Parameter, name)


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    return {key: value for key, value in vars(optimizer).items() if key not in _torch_attributes()}


def plain_attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    return {key: _plain(value) for key, value in attributes_of(optimizer).items() if _is_plain(value)}


def has_own_step(optimizer: Optimizer) -> bool:
    """Return whether the instance has a step of its own, as from apex's ASP."""
    step = vars(optimizer).get("step")
    while step is not type(optimizer).step and (
        hasattr(step, "_wrapped_by_lr_sched") or hasattr(step, "_torchdynamo_orig_callable")
    ):
        step = getattr(step, "__wrapped__", None)  # torch's schedulers only count steps, torch.compile only compiles
    return getattr(step, "__func__", step) not in (None, type(optimizer).step)


def held_by(optimizer: Optimizer) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def rate_of(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Return a parameter group's learning rate; raise `UnsupportedError` if the optimizer has none or sets its own."""
    rate = group.get("lr")
    if not isinstance(rate, (Real, Tensor)):
        raise UnsupportedError(
            f"{type(optimizer).__qualname__} has no learning rate (its lr is {rate!r}), and this method scales it by"
            ' staleness, or steps with it: use one that does not, such as method="async_sgd", or groups=1'
        )
    return float(rate)


def directions_of(optimizer: Optimizer) -> dict[int, float]:
    """Return, by ``id``, -1.0 for parameters whose steps go up (``maximize``), else 1.0."""
    return {
        id(parameter): -1.0 if group.get("maximize") else 1.0
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def holds(group: Mapping[str, Any], of: Container[Tensor]) -> bool:
    return not group["params"] or any(parameter in of for parameter in group["params"])


def state_of(optimizer: Optimizer, of: Container[Tensor]) -> dict[int, Any]:
    everything = optimizer.state_dict()["state"]
    places = [place for place, parameter in enumerate(held_by(optimizer)) if parameter in of]
    return {place: everything[whole] for place, whole in enumerate(places) if whole in everything}


def rebuild(
    description: Mapping[str, Any], parameters: Mapping[str, Parameter], resolve: Resolve | None = None
) -> Optimizer:
    """Make the optimizer that `describe` described, over parameters of the same names.

    ``resolve`` maps a class path to its class; by default only ``torch.optim`` is allowed.

    Raises:
        UnsupportedError: the class is not allowed or cannot be imported.
        MalformedMessage: a group has a parameter twice, for which torch would only warn.
    """
    for group in description["groups"]:
        if len(set(group["params"])) < len(group["params"]):
            raise MalformedMessage("an optimizer's parameter group has a parameter twice; give each once")
    kind = (resolve or resolver(()))(str(description["class"]))
    optimizer = object.__new__(kind)
    groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in description["groups"]]
    # Only the base class is initialized: a subclass's constructor may need arguments that no description can hold.
    Optimizer.__init__(optimizer, groups, dict(description["defaults"]))
    vars(optimizer).update(description["attributes"])
    for name, marks in description.get("parameters", {}).items():
        if name in parameters:  # with several servers, each holds some of the parameters
            vars(parameters[name]).update({key: value for key, value in marks.items() if _is_mark(key, value)})
    if description["state"]:
        optimizer.load_state_dict(
            {"state": description["state"], "param_groups": optimizer.state_dict()["param_groups"]}
        )
    _choose_fastest_kernel(optimizer)
    return optimizer


def resolver(allowed: Sequence[str]) -> Resolve:
    return admitting(Optimizer, ("torch.optim", "torch.optim."), "optimizer", "--allow-optimizer", allowed)


def check_servable(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates the loss several times in one step, and a parameter server has no loss to evaluate;"
            " use groups=1, or a first-order optimizer such as SGD or AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError(
            "SparseAdam needs sparse gradients, and gradients travel dense; use groups=1, or Adam with"
            " sparse=False embeddings"
        )
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise UnsupportedError(
            f"the optimizer class {kind.__qualname__} is defined in the script itself, where the parameter server"
            f" cannot import it; move it to a module of its own, {_STEP_ON_RANKS}"
        )
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        raise UnsupportedError(
            f"{kind.__qualname__} moves the weights in its train() and eval(), by a state that would be at the"
            f" parameter server: other weights would be evaluated than with one group; {_STEP_ON_RANKS}"
        )
    for where, values in (("its attribute", attributes_of(optimizer)), ("the default", optimizer.defaults)):
        for key, value in values.items():
            _checked(kind, where, key, value)
    hyperparameters_of(optimizer)


def _checked(kind: type[Optimizer], where: str, key: str, value: Any) -> Any:
    try:
        return _plain(value)
    except TypeError as error:
        raise UnsupportedError(
            f"{kind.__qualname__} cannot run at the parameter server: {where} {key!r} is a"
            f" {type(value).__qualname__}, and only plain values (numbers, strings, lists) can be sent there;"
            f" {_STEP_ON_RANKS}"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, numpy.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    raise TypeError(type(value).__qualname__)


def _is_plain(value: Any) -> bool:
    try:
        _plain(value)
    except TypeError:
        return False
    return True


@cache
def _torch_attributes() -> frozenset[str]:
    bare = object.__new__(Optimizer)
    Optimizer.__init__(bare, [torch.zeros(1)], {})
    return frozenset(vars(bare)) | {"step", "_opt_called", "_step_count", "_step_supports_amp_scaling"}


def _steppable_together(
    optimizer: Optimizer, pairs: list[tuple[Parameter, Tensor]]
) -> list[list[tuple[Parameter, Tensor]]]:
    """Split parameters and gradients into lists that torch can step in one call.

    Fused SGD of torch 2.13 cannot step parameters with and without momentum buffers together.
    """
    if type(optimizer) is torch.optim.SGD and any(group.get("fused") for group in optimizer.param_groups):
        known = [pair for pair in pairs if optimizer.state.get(pair[0], {}).get("momentum_buffer") is not None]
        if 0 < len(known) < len(pairs):
            seen = {id(parameter) for parameter, _ in known}
            return [known, [pair for pair in pairs if id(pair[0]) not in seen]]
    return [pairs]


def _choose_fastest_kernel(optimizer: Optimizer) -> None:
    """Select kernels: on a CPU, fused ones are the fastest and multi-tensor ones the slowest."""
    fusable = type(optimizer) in _MAY_BE_FUSED
    for group in optimizer.param_groups:
        group.update((flag, False) for flag in ("capturable", "differentiable") if flag in group)
        if "foreach" not in group:
            continue
        group["foreach"] = False
        if "fused" in group:
            # In half precision, the fused SGD of torch 2.13 silently leaves weights on a CPU unchanged.
            group["fused"] = fusable and all(p.dtype in (torch.float32, torch.float64) for p in group["params"])
