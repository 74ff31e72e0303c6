"""What is asked for: by arguments of a constructor, by environment variables, and by names of Lightning's registry.

Arguments that are unknown or of the wrong kind are refused; each message names them as the user wrote them, and says
what to pass instead. The environment and the registry are for where only a strategy's name can be passed; what is
passed to OmniStrategy itself wins over the environment.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal, TypeVar

from torch.nn.parallel import DistributedDataParallel

from lightning_omni.checks import check_kind, check_number, check_whole
from lightning_omni.errors import ConfigurationError, UnknownArgument
from lightning_omni.methods import Method
from lightning_omni.optimizer.meshes import Inside, ModelParallel, shown
from lightning_omni.protocol.all_reduce import AllReduce
from lightning_omni.protocol.wire_format import WireFormat

_Init = TypeVar("_Init", bound=Callable[..., None])
_OF_LIGHTNING = ("module", "device_ids")
"""What Lightning passes to DistributedDataParallel by itself."""

_NONE: Mapping[str, Any] = {}

GROUPS, METHOD, DATA = "LIGHTNING_OMNI_GROUPS", "LIGHTNING_OMNI_METHOD", "LIGHTNING_OMNI_DATA"
SERVER = "LIGHTNING_OMNI_SERVER"

_DATA: tuple[Literal["dynamic"], Literal["static"]] = ("dynamic", "static")
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
    owner: str, given: Mapping[str, Any], known: Iterable[str], others: Mapping[str, Any] = _NONE
) -> None:
    """Refuses keyword arguments that there are none of.

    Args:
        owner: the class that was given them.
        given: the keyword arguments.
        known: names of its own.
        others: names of what it passes on, by whose they are.

    Raises:
        UnknownArgument: one is not among them; the message has the name that it is nearest to.
    """
    own = list(known)
    names = [*own, *chain.from_iterable(others.values())]
    for name, value in given.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            takes = ", ".join([*own, *(f"and what {whose} takes" for whose in others)])
            meant = f"did you mean {near[0]}={value!r}?" if near else f"it takes {takes}"
            raise UnknownArgument(f"{owner}({name}={value!r}): there is no argument {name}; {meant}")


def refuses_unknown(init: _Init) -> _Init:
    """For a constructor: a keyword argument that it does not take is refused with the one that was meant."""
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        refuse_unknown(type(self).__name__, options, known)
        init(self, *args, **options)

    return checked  # type: ignore[return-value]


def refuse_unknown_of_ddp(strategy: Any, own: type, given: Mapping[str, Any]) -> None:
    """Refuses what neither a strategy, nor the DDPStrategy that it is, nor DistributedDataParallel takes.

    DDPStrategy passes what it does not know to DistributedDataParallel, which is made much later, on every rank.

    Args:
        strategy: whose constructor is running.
        own: the class whose constructor took ``given`` as the rest.
        given: the rest.

    Raises:
        UnknownArgument: an argument is not known; the message has the one that was meant.
        ConfigurationError: an argument is Lightning's to pass.
    """
    order = type(strategy).__mro__
    base = next(each for each in order[order.index(own) + 1 :] if "__init__" in vars(each))
    ddp = [name for name in _parameters(DistributedDataParallel) if name not in _OF_LIGHTNING]
    for name in _OF_LIGHTNING:
        if name in given:
            raise ConfigurationError(
                f"{name}={given[name]!r}: Lightning passes it to DistributedDataParallel; leave it"
            )
    passed_on = {base.__name__: [*_parameters(base), *ddp]}
    refuse_unknown(type(strategy).__name__, given, _parameters(own), passed_on)


def check_strategy(
    method: object,
    server: object,
    host: object,
    heartbeat_timeout: object,
    max_nonfinite_pushes: object,
    merged: object,
    record: object,
    wire: object,
    overlap: object,
    servers: object,
    validation: object,
    join: object,
    save_every: object,
    inside: object,
    max_rejoins: object,
    progress_timeout: object,
    all_reduce: object,
    ddp: Mapping[str, Any],
) -> None:
    """Refuses arguments of OmniStrategy that are of the wrong kind; the code that uses them checks what they mean.

    Raises:
        ConfigurationError: an argument is of another kind; the message names it.
    """
    text = (str, type(None))
    check_kind("method", method, (str, Method), 'a name, as "hardsync", or a value, as methods.DiLoCo(period=50)')
    check_kind("server", server, text, 'the address of a server, as "tcp://host:port", or None')
    check_kind("host", host, text, "an address, or None")
    check_number("heartbeat_timeout", heartbeat_timeout, "seconds, at least 2")
    check_whole("max_nonfinite_pushes", max_nonfinite_pushes, "a number of pushes, 1 or more", low=1)
    check_kind("merged", merged, text, "the name of a submodule, or None")
    check_kind("record", record, (*text, os.PathLike), "a file, or None")
    check_kind(
        "wire",
        wire,
        (str, WireFormat, Mapping),
        'a name, as "int8", a value, as wire_formats.TopK(fraction=0.001), or both ways',
    )
    check_kind("overlap", overlap, bool, "True or False")
    check_kind("all_reduce", all_reduce, (str, AllReduce), 'a name, as "powersgd:4", or a value, as PowerSGD(rank=4)')
    if all_reduce != "fp32" and ddp.get("ddp_comm_hook") is not None:
        raise ConfigurationError(
            f"all_reduce={all_reduce!r} and ddp_comm_hook={ddp['ddp_comm_hook']!r}: both say how gradients are"
            " averaged; leave one of them out"
        )
    if servers != "per-node":
        check_whole("servers", servers, 'a number of servers, 1 or more, or "per-node"', low=1)
    if validation not in ("wait", "published"):
        raise ConfigurationError(f'validation={validation!r}: pass "wait" or "published"')
    check_kind("join", join, (bool, type(None)), "True or False")
    if save_every is not None:
        check_number("save_every", save_every, "the seconds between two saves, more than 0, or None", above=0)
    if not isinstance(inside, ModelParallel) and inside not in ("ddp", "fsdp"):
        raise ConfigurationError(
            f'inside={inside!r}: pass "ddp", "fsdp" or ModelParallelStrategy(data_parallel_size=..., '
            "tensor_parallel_size=...) of lightning.pytorch.strategies or pytorch_lightning.strategies itself"
        )
    if progress_timeout is not None:
        check_number("progress_timeout", progress_timeout, "seconds, at least 2, or None", low=2, below=math.inf)
    check_whole("max_rejoins", max_rejoins, "how often in a row an evicted group may join again, or 0")


def check_join(data: str, validation: str, merged: str | None) -> None:
    """Refuses what groups that join on their own cannot do.

    Raises:
        ConfigurationError: an argument asks for it.
    """
    if data == "static":
        raise ConfigurationError(
            'data="static" and join=True: samples that are dealt out beforehand leave none for a group that joins; pass'
            ' data="dynamic"'
        )
    if validation == "published":
        raise ConfigurationError(
            'validation="published" and join=True: a group that joins knows nothing of the validations that are due;'
            ' pass validation="wait"'
        )
    if merged is not None:
        raise ConfigurationError(
            f"merged={merged!r} and join=True: a merged head's access is dealt out to the groups that were formed;"
            " leave merged= out"
        )


def check_inside(
    inside: Inside,
    merged: str | None,
    validation: str,
    save_distributed_checkpoint: bool,
    rebalance: str,
    ddp: Mapping[str, Any],
) -> None:
    """Refuses what does not go with groups whose members hold the model together.

    Raises:
        ConfigurationError: an argument does not; the message names it.
    """
    check_kind("save_distributed_checkpoint", save_distributed_checkpoint, bool, "True or False")
    if save_distributed_checkpoint and inside == "ddp":
        raise ConfigurationError(
            'save_distributed_checkpoint=True and inside="ddp": each rank has the whole model, and rank 0 saves it as'
            ' one file; leave it out, or pass inside="fsdp"'
        )
    if inside == "ddp":
        return
    if merged is not None:
        raise ConfigurationError(
            f"merged={merged!r} and {shown(inside)}: a merged head is handed to one server whole, and each member of a"
            ' group has a part of it; leave merged= out, or pass inside="ddp"'
        )
    if validation == "published":
        raise ConfigurationError(
            f'validation="published" and {shown(inside)}: the weights of a validation are fetched whole by one group;'
            ' pass validation="wait", or inside="ddp"'
        )
    if rebalance == "auto" and isinstance(inside, ModelParallel):
        raise ConfigurationError(
            f'rebalance="auto" and {shown(inside)}: ranks that compute one batch together cannot get different parts of'
            ' it; pass rebalance="off", or inside="fsdp"'
        )
    own = {"timeout", "process_group_backend", "start_method", "accelerator", "parallel_devices"}
    own |= {"cluster_environment", "checkpoint_io", "precision_plugin"}
    for name, value in ddp.items():
        if name not in own and value is not None:
            raise ConfigurationError(
                f"{name}={value!r} and {shown(inside)}: it is an argument of DistributedDataParallel, which is not used"
                ' then; leave it out, or pass inside="ddp"'
            )


def _parameters(kind: type) -> list[str]:
    """Names of all that a constructor takes by name."""
    collected = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    return [each.name for each in parameters if each.kind not in collected and each.name != "self"]


# --- Environment and registry ----------------------------------------------------------------------------------------


def register_names(registry: Any, strategy: type) -> None:
    """Registers the names of a namespace's strategy."""
    for name, (description, options) in _NAMES.items():
        registry.register(name, strategy, description=description, override=True, **options)


class Asked:
    """What is asked for, by an argument or else by the environment.

    Args:
        groups: as passed to OmniStrategy.
        method: likewise.
        data: likewise.
        server: likewise.
        join: likewise; None joins the run of a server that the environment names.

    Attributes:
        groups: number of groups, or None.
        method: a method or its name.
        data: ``"dynamic"`` or ``"static"``.
        server: the address of a server, or None.
        join: whether to join its run on its own.

    Raises:
        ConfigurationError: a variable is no number of groups, or ``data`` is something else.
    """

    data: Literal["dynamic", "static"]

    def __init__(
        self,
        groups: int | None,
        method: str | Method | None,
        data: str | None,
        server: str | None = None,
        join: bool | None = None,
    ) -> None:
        self._variables: list[str] = []
        self.groups = self._number_of_groups() if groups is None else groups
        self.method = self._said(METHOD, "async_sgd") if method is None else method
        self.data = self._checked(self._said(DATA, "dynamic") if data is None else data)
        self.server = (self._said(SERVER, "") or None) if server is None else server
        self.join = (server is None and self.server is not None) if join is None else join

    def _number_of_groups(self) -> int | None:
        text = self._said(GROUPS, "")
        try:
            return int(text) if text else None
        except ValueError:
            raise ConfigurationError(
                f"{GROUPS}={text!r} in the environment: set it to a number of groups, as 2, or unset it"
            ) from None

    def _checked(self, data: str) -> Literal["dynamic", "static"]:
        with self.naming_variables():
            for known in _DATA:
                if data == known:
                    return known
            raise ConfigurationError(f'data={data!r}: pass "dynamic" or "static"')

    def _said(self, variable: str, otherwise: str) -> str:
        text = os.environ.get(variable, "").strip()
        if text:
            self._variables.append(f"{variable}={text}")
        return text or otherwise

    @contextmanager
    def naming_variables(self) -> Iterator[None]:
        """Errors about what is asked for say so where it comes from the environment."""
        try:
            yield
        except ConfigurationError as error:
            if not self._variables:
                raise
            raise ConfigurationError(f"{error} (the environment says {', '.join(self._variables)})") from error
