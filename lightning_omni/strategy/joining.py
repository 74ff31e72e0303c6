"""What a group that joins a run on its own is given beside the weights, so that it stands where the run stands.

It is made by the recorder's group whenever the groups have parted, and kept by the server: a checkpoint without weights
and without optimizer state, and what it says of progress is that of the run. A group that joins takes it over before
its loops begin, and trains on from the epoch that is under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_omni.errors import ConfigurationError, MalformedMessage, UnsupportedError
from lightning_omni.methods.master import held_by
from lightning_omni.optimizer import names_of
from lightning_omni.optimizer.model_replica import Part
from lightning_omni.optimizer.sharding import are_rows, fill, is_part, local_of, reshard, tensors_of
from lightning_omni.protocol.codec import pack
from lightning_omni.protocol.progress import Progress
from lightning_omni.strategy import _private
from lightning_omni.strategy.epochs import Entered
from lightning_omni.strategy.grouping import GroupedStrategy
from lightning_omni.strategy.scheduler_states import described

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

_APART = ("state_dict", "loops", "epoch", "global_step")
"""What of Lightning's checkpoint is not taken: weights are the server's, and progress is counted in samples."""
_ALIKE = (
    "max_epochs",
    "max_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "reload_dataloaders_every_n_epochs",
)
"""What the Trainers of all groups must be given alike."""


class RunStates:
    """Makes and takes over the state of a run that groups join.

    Args:
        strategy: whose run.

    Attributes:
        is_described: whether Lightning is asked for a checkpoint that has no weights in it.
    """

    def __init__(self, strategy: GroupedStrategy) -> None:
        self._strategy = strategy
        self._told: set[str] = set()
        self._again: dict[str, Any] | None = None
        self._limits: dict[str, float | None] = {}
        self.is_described = False

    def check(self, trainer: Trainer) -> None:
        """Raises `UnsupportedError` for what groups that join cannot do in this fit."""
        if self._strategy.world.enlistment is None:
            return
        if _private.finds_rate(trainer):
            raise UnsupportedError(
                "join=True with LearningRateFinder or Tuner.lr_find: it measures all ranks as one group, which ranks of"
                " different launchers cannot form; find the rate before, without server= and LIGHTNING_OMNI_SERVER, and"
                " pass it to all groups"
            )
        if _private.replaces_scheduler(trainer):
            raise UnsupportedError(
                "join=True with StochasticWeightAveraging: it replaces a learning-rate scheduler in mid-run, and a"
                " group that joins has none to replace it with; use WeightAveraging, or start all ranks together"
            )
        if len(_private.averaged_models(trainer)) > 1:
            raise UnsupportedError(
                "join=True with several WeightAveraging callbacks: a checkpoint has room for the average of one, and so"
                " has what a group that joins is given; keep one of them"
            )
        self._limits = {name: getattr(trainer, name) for name in _ALIKE}

    # --- The recorder's group ----------------------------------------------------------------------------------------

    def store(self) -> None:
        """The groups have parted: the server gets what a further one is given. On all ranks."""
        world = self._strategy.world
        if world.enlistment is None or world.process_groups.live.ranks[0] not in world.members:
            return
        self.renew()

    def renew(self) -> None:
        """A further group is given how the run stands now. On all of the recorder's group, while groups compute."""
        world = self._strategy.world
        reshard(world.held.sharded)
        tree = self._describe()  # on all of the group: what users save may need collectives
        if tree["shared"]:
            if world.speaks and not world.is_leader:
                world.channel.store.store_run_state(*pack({"shared": tree["shared"]}))
            world.wait_for_members()  # what the leader stores lets others in
        if world.is_leader:
            try:
                packed, buffer = pack(tree)
            except MalformedMessage as error:
                packed, buffer = pack({"refused": f"the run's schedulers or optimizers cannot be sent: {error}"})
            world.channel.store.store_run_state(packed, buffer)

    def _describe(self) -> dict[str, Any]:
        strategy, trainer = self._strategy, self._strategy.pl_module.trainer
        self.is_described = True
        try:
            checkpoint = _private.checkpoint_of(trainer)
        finally:
            self.is_described = False
        served = {id(each) for part in strategy.world.parts for each in part.replica.ordered}
        entries = tensors_of(strategy.pl_module).items()
        own = {name: each for name, each in entries if isinstance(each, Tensor) and id(each) not in served}
        shared = {name: own.pop(name) for name in list(own) if is_part(own[name])}
        bases = strategy.epochs.schedulers.counting
        averages = _private.averaged_models(trainer)
        loops = self._sendable("the loops' progress", {"loops": checkpoint["loops"]})
        progress = strategy.epochs.progress
        return {
            "limits": self._limits,
            "configured": self._configured(),
            "epoch": trainer.current_epoch,
            "counters": _private.progress_counters(trainer)[1:],
            "samples": strategy.epochs.samples,
            "validations": strategy.epochs.published.state,
            "metrics": _private.known_metrics(trainer),
            "order": strategy.epochs.data.order,
            "split": strategy.epochs.data.split,
            "folders": _private.folders(trainer),
            "reloads": _private.reload_epochs(trainer),
            "schedule": [list(bases.get(config.scheduler, ())) for config in trainer.lr_scheduler_configs],
            "schedulers": checkpoint.pop("lr_schedulers"),
            "hyperparameters": checkpoint.pop("optimizer_states"),
            "layouts": strategy.world.parameter_groups.first_layouts,
            "held": [_names_in(optimizer, strategy.pl_module) for optimizer in strategy.optimizers],
            "trainable": {name: each.requires_grad for name, each in strategy.pl_module.named_parameters()},
            "tracking": _tracking(strategy.pl_module),
            "module": {name: each.detach() for name, each in own.items()},
            "shared": {name: local_of(each) for name, each in shared.items()},
            "averages": [average.state_dict() for average in averages],
            "callbacks": self._sendable("the state of the callback", checkpoint.pop("callbacks")),
            "more": self._sendable("the checkpoint's entry", {k: v for k, v in checkpoint.items() if k not in _APART}),
            # What follows is for `lightning_omni.strategy.exported`; groups that join have a module of their own.
            **loops,
            "progress": None if progress is None else msgspec.to_builtins(progress),
            "automatic": strategy.pl_module.automatic_optimization,
            "keys": self._keys(),
            "parts": [self._described(part) for part in strategy.world.parts],
            "kinds": [
                {
                    "class": described(config.scheduler),
                    "interval": config.interval,
                    "frequency": config.frequency,
                    "optimizer": self._number(getattr(config.scheduler, "optimizer", None)),
                }
                for config in trainer.lr_scheduler_configs
            ],
        }

    def _configured(self) -> dict[str, str]:
        """What all groups must have alike, or they train otherwise or wait for others in different places; in words.

        What optimizers and schedulers are set to is not in it: that is the run's.
        """
        strategy, trainer = self._strategy, self._strategy.pl_module.trainer
        schedulers = [_in_words(config) for config in trainer.lr_scheduler_configs]
        return {
            "optimization": "automatic" if strategy.pl_module.automatic_optimization else "manual",
            "optimizers": ", ".join(type(each).__name__ for each in strategy.optimizers) or "none",
            "schedulers": ", ".join(schedulers) or "none",
            "callbacks": ", ".join(_private.deciding_callbacks(trainer)) or "none that saves, stops or tunes",
        }

    def _keys(self) -> dict[str, str]:
        """For every tensor of the module's state, the name by which the server has it; empty if it has it not."""
        strategy = self._strategy
        served = {id(each): name for part in strategy.world.parts for name, each in part.replica.parameters.items()}
        return {name: served.get(id(each), "") for name, each in tensors_of(strategy.pl_module).items()}

    def _described(self, part: Part) -> dict[str, Any]:
        """What belongs to which parameter, of what the server holds of an optimizer."""
        places = {id(each): place for place, each in enumerate(held_by(part.optimizer))}
        parameters, world = part.replica.parameters, self._strategy.world
        return {
            "optimizer": self._number(part.optimizer),
            "names": list(parameters),
            "places": [places.get(id(each), -1) for each in parameters.values()],
            "shapes": [list(each.shape) for each in parameters.values()],
            "rows": world.share is not None and are_rows(parameters.values(), world.share[1]),
        }

    def _number(self, optimizer: Any) -> int:
        """Which of the Trainer's optimizers this is; -1 for none of them."""
        own = [id(getattr(each, "optimizer", each)) for each in self._strategy.optimizers]
        mine = id(getattr(optimizer, "optimizer", optimizer))
        return own.index(mine) if mine in own else -1

    def _sendable(self, what: str, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Those entries that can be sent; of others it is said once that groups that join do without."""
        problems = {name: problem for name, value in entries.items() if (problem := _problem(value))}
        for name in problems.keys() - self._told:
            self._told.add(name)
            self._strategy.rank_zero_warn(
                f"OmniStrategy: {what} {name} is not given to groups that join: {problems[name]}"
            )
        return {name: value for name, value in entries.items() if name not in problems}

    # --- A group that has joined -------------------------------------------------------------------------------------

    def take_over(self, trainer: Trainer) -> None:
        """This group joins the run, and stands where it stands. On all of it, before its loops begin.

        Raises:
            UnsupportedError: what the run is at cannot be sent.
            ConfigurationError: this group was given other limits or callbacks, or has other optimizers or schedulers.
        """
        strategy = self._strategy
        joined = strategy.world.take_part()
        tree = strategy.world.channel.store.read_run_state()
        self._check_given(trainer, tree)
        assert joined.plan is not None  # or the server would not have let it in
        checkpoint = {**tree["more"], "callbacks": tree["callbacks"], "state_dict": tree["module"]}
        if tree["averages"]:  # the callback loads both, of which the module's own weights are read when training begins
            [average] = tree["averages"]
            whole = {name[7:]: each for name, each in average.items() if name.startswith("module.")}
            checkpoint |= {"state_dict": whole, "current_model_state": strategy.pl_module.state_dict()}
        _private.set_folders(trainer, tree["folders"])
        _private.load_callbacks(trainer, checkpoint)
        if tree["shared"] and not (strategy.world.share is None or strategy.world.is_leader):
            tree["shared"] = strategy.world.channel.store.read_run_state(share=True)["shared"]
        self._take_over_module(tree)
        self._again = tree
        schedule: dict[Any, Any] = {}
        for config, state, base in zip(trainer.lr_scheduler_configs, tree["schedulers"], tree["schedule"], strict=True):
            config.scheduler.load_state_dict(_like(vars(config.scheduler), state))
            if base:
                schedule[config.scheduler] = tuple(base)
        entered = Entered(
            plan=joined.plan,
            samples=tree["samples"],
            progress=msgspec.convert(tree["progress"], Progress | None),
            validations=tree["validations"],
            split=tree["split"],
        )
        strategy.epochs.enter(entered, schedule)
        _private.set_metrics(trainer, tree["metrics"])
        strategy.epochs.data.order = tree["order"]
        _private.begin_at(trainer, tree["epoch"], tree["counters"])

    def _check_given(self, trainer: Trainer, tree: Mapping[str, Any]) -> None:
        """Raises if the run's state cannot be taken over with what this group was given."""
        if "refused" in tree:
            raise UnsupportedError(f"no group can join this run: {tree['refused']}")
        for name, limit in tree["limits"].items():
            if self._limits[name] != limit:  # it would end while others train on, or train on alone
                raise ConfigurationError(
                    f"{name}={self._limits[name]}: the run that this group joins has {name}={limit}; give all groups"
                    " the same"
                )
        for name, own in self._configured().items():
            if own != (theirs := tree["configured"][name]):
                raise ConfigurationError(
                    f"{name}: {own}; the run that this group joins has: {theirs}; give all groups the same script"
                )
        if len(_private.averaged_models(trainer)) != len(tree["averages"]):
            raise ConfigurationError(
                "callbacks: WeightAveraging is either in the run or in the group that joins it, and not in both; give"
                " all groups the same callbacks"
            )

    def hooks_are_over(self) -> None:
        """The hooks of the epoch's start are over, which those of the run had called before this group was told of it.

        What they have done here once more, to learning rates, weights and counts of callbacks, say, is as it was told.
        """
        if (tree := self._again) is None:
            return
        self.take_over_optimizers()
        self._again = None
        _private.load_states_of_callbacks(self._strategy.pl_module.trainer, tree)
        _private.set_reload_epochs(self._strategy.pl_module.trainer, tree["reloads"])
        self._take_over_module(tree)
        self._strategy.world.read_again()

    def _take_over_module(self, tree: Mapping[str, Any]) -> None:
        """Buffers, and parameters that are not trained. Of what the members of a group hold together, each its share.

        Raises:
            ConfigurationError: the module of the run has more in it.
        """
        module = self._strategy.pl_module
        unexpected = Module.load_state_dict(module, tree["module"], strict=False).unexpected_keys
        if unexpected:
            raise ConfigurationError(
                f"the module of the run that this group joins has {unexpected[0]}, and this group's module has not:"
                " give all groups the same module, which has it from the beginning; what a callback adds in mid-run"
                " (ModelPruning, say), no group that joins later has"
            )
        if tree["shared"]:
            fill(tensors_of(module), tree["shared"])

    def training_begins(self) -> None:
        """Hooks before training are over, and weights are about to be read."""
        if self._again is not None:
            self.take_over_optimizers()
            self._strategy.world.parameter_groups.begin_with(self._again["layouts"])

    def take_over_optimizers(self) -> None:
        """This group trains what the run trains, with its settings. When ``on_fit_start`` is over, on all of it.

        Before that, a callback may have frozen what the run has unfrozen since. Weights of parameters that come to
        an optimizer so are read before the first batch, as if this group had added them itself.

        Raises:
            ConfigurationError: the optimizers of the run hold what those of this group cannot.
        """
        if (run := self._again) is None:
            return
        module = self._strategy.pl_module
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(run["trainable"].get(name, parameter.requires_grad))
        for name, tracks in run["tracking"].items():
            module.get_submodule(name).track_running_stats = tracks
        optimizers = self._strategy.optimizers
        for optimizer, state, held in zip(optimizers, run["hyperparameters"], run["held"], strict=True):
            if held != _names_in(optimizer, module):
                _hold(optimizer, held, module)
            for group, theirs in zip(optimizer.param_groups, state["param_groups"], strict=True):
                group.update(
                    (name, _as_here(group.get(name), value)) for name, value in theirs.items() if name != "params"
                )


def _in_words(config: Any) -> str:
    """A scheduler that Lightning was given, and when it is stepped."""
    name, inside = described(config.scheduler)
    within = f"({', '.join(one or 'of its own' for one, _ in inside)})" if inside else ""
    when = config.interval if config.frequency == 1 else f"{config.frequency} {config.interval}s"
    return f"{name or type(config.scheduler).__name__}{within} every {when}"


def _names_in(optimizer: Optimizer, module: Module) -> list[list[str]]:
    """The parameters in each parameter group, by name; one that the module does not have is an empty string."""
    names = names_of(module)
    return [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]


def _hold(optimizer: Optimizer, held: Sequence[Sequence[str]], module: Module) -> None:
    """The optimizer's parameter groups become those of the run, which a callback has changed since it began."""
    known, before = dict(module.named_parameters()), optimizer.param_groups
    if missing := [name for group in held for name in group if name not in known]:
        raise ConfigurationError(
            f"the optimizers of the run hold {missing[0] or 'a parameter that is not in the module'}, which came"
            " to them after it had begun, and this group cannot find it in its module: give all groups the same module,"
            " and register in it what an optimizer may come to hold"
        )
    optimizer.param_groups = [
        {**(before[number] if number < len(before) else optimizer.defaults), "params": [known[name] for name in group]}
        for number, group in enumerate(held)
    ]


def _tracking(module: Module) -> dict[str, bool]:
    """Whether normalization layers follow the statistics of what they see, as BaseFinetuning has them do or not."""
    flags = ((name, getattr(each, "track_running_stats", None)) for name, each in module.named_modules())
    return {name: flag for name, flag in flags if isinstance(flag, bool)}


def _problem(tree: Any) -> str:
    """Why this cannot be sent, or an empty string."""
    if any(isinstance(leaf, Tensor) and is_part(leaf) for leaf in tree_leaves(tree)):
        return "it holds a part of the model"
    try:
        pack(tree)
    except MalformedMessage as error:
        return str(error)
    return ""


def _as_here(own: Any, value: Any) -> Any:
    """Return a hyperparameter of the run; a tensor, which was sent from the CPU, on the device of this group's own."""
    return value.to(own.device) if isinstance(value, Tensor) and isinstance(own, Tensor) else value


def _like(own: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler's state as it was before it was sent: a Counter travels as a dict."""
    return {name: Counter(value) if isinstance(own.get(name), Counter) else value for name, value in state.items()}
