"""The options of OmniStrategy: constructor arguments, environment variables and names in Lightning's registry.

Arguments override the environment.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Literal, TypeVar

from torch.nn.parallel import DistributedDataParallel

from lightning_omni.checks import check_choice, check_kind, keep_plain
from lightning_omni.combinations import refuse_pairs
from lightning_omni.errors import ConfigurationError, UnknownArgument
from lightning_omni.methods import Method
from lightning_omni.runtime.model.meshes import FSDP, ModelParallel, Sharding, shown
from lightning_omni.runtime.options import Elastic, Server, WorldOptions, sharding_of
from lightning_omni.strategy.lightning_internals.strategies import model_parallel_options
from lightning_omni.transport.zeromq.keys import ENVIRONMENT as KEY
from lightning_omni.wire.compression import Compression

_Init = TypeVar("_Init", bound=Callable[..., None])
_OF_LIGHTNING = ("module", "device_ids")
"""Arguments that Lightning itself passes to DistributedDataParallel."""

_NONE: Mapping[str, Any] = {}

_VALUES: Mapping[str, Any] = {"compression": Compression, "server": Server, "elastic": Elastic, "model_parallel": FSDP}
_WITHIN = {each.name: f"{name}={kind.__name__}" for name, kind in _VALUES.items() for each in fields(kind)}
"""The value to which an argument belongs, by the argument's name, as in ``host``: ``server=Server``."""

GROUPS, METHOD, DATA = "LIGHTNING_OMNI_GROUPS", "LIGHTNING_OMNI_METHOD", "LIGHTNING_OMNI_DATA"
SERVER = "LIGHTNING_OMNI_SERVER"
_PREFIX = "LIGHTNING_OMNI_"
_SPELLING = 0.75
"""Least ratio of difflib for a misspelt variable; that of Kubernetes' LIGHTNING_OMNI_SERVER_PORT is lower."""

_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "omni": ("Synchronous inside compute groups, asynchronous across them", {}),
    **{f"omni_{groups}": (f"OmniStrategy with {groups} groups", {"groups": groups}) for groups in (2, 4, 8, 16, 32)},
    **{
        f"omni_{name}": (f"OmniStrategy with start_method {method!r}", {"start_method": method})
        for name, method in (("spawn", "spawn"), ("fork", "fork"), ("notebook", "fork"))
    },
    "omni_find_unused_parameters_true": ("OmniStrategy, find_unused_parameters=True", {"find_unused_parameters": True}),
}


def refuse_unknown(
    owner: str,
    given: Mapping[str, Any],
    known: Iterable[str],
    others: Mapping[str, Any] = _NONE,
    within: Mapping[str, str] = _NONE,
) -> None:
    """Reject unknown keyword arguments of a class.

    ``known`` are names of its own arguments, ``others`` those that it passes on, by the class that takes them,
    ``within`` the values that it takes, by their arguments' names.
    """
    own = list(known)
    names = [*own, *chain.from_iterable(others.values())]
    for name, value in given.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            takes = ", ".join([*own, *(f"and what {whose} takes" for whose in others)])
            meant = f"did you mean {near[0]}={value!r}?" if near else f"it takes {takes}"
            if name in within:
                meant = f"pass {within[name]}({name}={value!r})"
            raise UnknownArgument(f"{owner}({name}={value!r}): there is no argument {name}; {meant}")


def refuses_unknown(init: _Init) -> _Init:
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        refuse_unknown(type(self).__name__, options, known)
        init(self, *args, **options)

    return checked  # type: ignore[return-value]


def refuse_unknown_of_ddp(strategy: Any, own: type, given: Mapping[str, Any]) -> None:
    """Reject arguments that neither the strategy nor DDPStrategy nor DistributedDataParallel takes from users.

    ``own`` is the class whose constructor has collected ``given``.
    """
    order = type(strategy).__mro__
    base = next(each for each in order[order.index(own) + 1 :] if "__init__" in vars(each))
    ddp = [name for name in _parameters(DistributedDataParallel) if name not in _OF_LIGHTNING]
    for name in _OF_LIGHTNING:
        if name in given:
            raise ConfigurationError(
                f"{name}={given[name]!r}: Lightning passes it to DistributedDataParallel itself; leave it out"
            )
    passed_on = {base.__name__: [*_parameters(base), *ddp]}
    refuse_unknown(type(strategy).__name__, given, _parameters(own), passed_on, _WITHIN)


def split_model_parallel(given: object) -> tuple[Sharding, dict[str, Any]]:
    theirs = model_parallel_options(given)
    if theirs is not None:
        names = ("data_parallel_size", "tensor_parallel_size", "save_distributed_checkpoint")
        return ModelParallel(*(theirs.pop(name) for name in names)), theirs
    if given is None or given == "fsdp" or isinstance(given, FSDP):
        return sharding_of(given), {}
    raise ConfigurationError(
        f'model_parallel={given!r}: pass "fsdp", FSDP(...), None, or ModelParallelStrategy(data_parallel_size=...,'
        " tensor_parallel_size=...) of lightning.pytorch.strategies or pytorch_lightning.strategies itself"
    )


@dataclass(frozen=True)
class FitOptions:
    """The arguments of OmniStrategy that are neither in `WorldOptions` nor DDPStrategy's."""

    merged: str | None = None
    data: Literal["dynamic", "static"] = "dynamic"
    rebalance: Literal["off", "auto"] = "off"
    validation: Literal["wait", "published"] = "wait"

    def __post_init__(self) -> None:
        keep_plain(self)
        check_kind("merged", self.merged, (str, type(None)), "the name of a submodule, or None")
        check_choice("data", self.data, ("dynamic", "static"))
        check_choice("rebalance", self.rebalance, ("auto", "off"))
        check_choice("validation", self.validation, ("wait", "published"))

    @property
    def of_all_ranks(self) -> dict[str, str]:
        """Return the arguments, in which ranks that are started together must agree, as text."""
        return {each.name: repr(getattr(self, each.name)) for each in fields(self)}

    def check(self, world: WorldOptions, ddp: Mapping[str, Any]) -> None:
        all_reduce = world.compression.all_reduce
        if all_reduce != "fp32" and ddp.get("ddp_comm_hook") is not None:
            raise ConfigurationError(
                f"Compression(all_reduce={all_reduce!r}) and ddp_comm_hook={ddp['ddp_comm_hook']!r}: both say how"
                " gradients are averaged; leave one of them out"
            )
        used = {
            "merged": (self.merged is not None, f"merged={self.merged!r}"),
            "static": (self.data == "static", 'data="static"'),
            "rebalance": (self.rebalance == "auto", 'rebalance="auto"'),
            "published": (self.validation == "published", 'validation="published"'),
        }
        own = {name: given for name, (is_used, given) in used.items() if is_used}
        refuse_pairs(world.resolved_method(), {**own, **world.features})
        if world.is_sharded:
            self._check_sharded(world.model_parallel, ddp)

    def _check_sharded(self, sharding: Sharding, ddp: Mapping[str, Any]) -> None:
        own = {"timeout", "process_group_backend", "start_method", "accelerator", "parallel_devices"}
        own |= {"cluster_environment", "checkpoint_io", "precision_plugin"}
        defaults = inspect.signature(DistributedDataParallel).parameters  # LightningCLI passes all of them
        for name, value in ddp.items():
            is_default = value is None or (name in defaults and value == defaults[name].default)
            if name not in own and not is_default:
                raise ConfigurationError(
                    f"{name}={value!r} and {shown(sharding)}: it is an argument of DistributedDataParallel, which is"
                    " not used then; leave it or model_parallel= out"
                )


def _parameters(kind: type) -> list[str]:
    collected = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    return [each.name for each in parameters if each.kind not in collected and each.name != "self"]


# --- Environment and registry ----------------------------------------------------------------------------------------


def _refuse_misspelt() -> None:
    read = {name.removeprefix(_PREFIX): name for name in (GROUPS, METHOD, DATA, SERVER, KEY)}
    for name in os.environ:
        own = name.removeprefix(_PREFIX)
        if own == name or own in read:
            continue
        if near := difflib.get_close_matches(own, read, n=1, cutoff=_SPELLING):
            raise ConfigurationError(f"{name} in the environment is read by nothing: rename it to {read[near[0]]}")


def register_names(registry: Any, strategy: type) -> None:
    for name, (description, options) in _NAMES.items():
        registry.register(name, strategy, description=description, override=True, **options)


class RequestedOptions:
    """The user's options, by arguments or else by environment variables.

    Args:
        server: without an address, the environment names the server.
        elastic: ``join=None`` joins the run of a server that the environment names.

    Attributes:
        names_server: whether the user's arguments name a running server.

    Raises:
        ConfigurationError: LIGHTNING_OMNI_GROUPS is no number, LIGHTNING_OMNI_SERVER no address, a variable is
            misspelt, or ``server`` or ``elastic`` is wrong.
    """

    def __init__(
        self,
        groups: int | None,
        method: str | Method | None,
        data: str | None,
        server: str | Server | None = None,
        elastic: bool | Elastic | None = None,
    ) -> None:
        _refuse_misspelt()
        self._variables: list[str] = []
        self.groups = self._number_of_groups() if groups is None else groups
        self.method = self._said(METHOD, "async_sgd") if method is None else method
        self.data: Any = self._said(DATA, "dynamic") if data is None else data
        self.server, self.elastic = Server.of(server), Elastic.of(elastic)
        self.names_server = self.server.address is not None
        if not self.names_server and (address := self._said(SERVER, "")):
            with self.naming_variables():
                self.server = replace(self.server, address=address)
            if self.elastic.join is None:
                self.elastic = replace(self.elastic, join=True)

    def _number_of_groups(self) -> int | None:
        text = self._said(GROUPS, "")
        try:
            return int(text) if text else None
        except ValueError:
            raise ConfigurationError(
                f"{GROUPS}={text!r} in the environment: set it to a number of groups, such as 2, or unset it"
            ) from None

    def _said(self, variable: str, otherwise: str) -> str:
        text = os.environ.get(variable, "").strip()
        if text:
            self._variables.append(f"{variable}={text}")
        return text or otherwise

    @contextmanager
    def naming_variables(self) -> Iterator[None]:
        try:
            yield
        except ConfigurationError as error:
            if not self._variables:
                raise
            raise ConfigurationError(f"{error} (the environment says {', '.join(self._variables)})") from error
