"""State of a worker besides its weights: optimizer, scheduler, random numbers, sums of the epoch.

The pipeline is drained: no messages, activations, stashed versions or gradients are left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...profiles.errors import TargetError
from ...profiles.files import TaggedFile
from ...profiles.tasks.hooks import RunLength, call_hook
from ...profiles.tasks.optimizers import has_modes, has_own_state, train_mode
from ...profiles.tracing.call import mark_of
from ..prepare.devices import put
from ..prepare.tied_parameters import model_parameters, write
from ..records.metrics import EpochSums
from ..stage.optimizer import StageUpdates
from ..stage.stage import Stage
from ..weights.prediction import LAST
from .learning_rate import go_on

# Nested optimizer and scheduler state as JSON, its tensors apart --------------------------------
# JSON has no tuples, no keys that aren't strings and no infinities: those are written as objects
# of one entry that says what they are, ``{"tuple": [...]}``; so are tensors, by the name that
# they have in the file beside it. Numbers come back as they were, bit for bit.


def pack(tree: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """What of `tree` JSON can hold; its tensors are added to `tensors`.

    Args:
        path: names the tree; tensors get names below it.

    Raises TargetError for what is neither a tensor nor plain data.
    """
    if isinstance(tree, Tensor):
        tensors[path] = tree.detach()
        return {"tensor": path}
    # Types alone: a subclass would come back as something else.
    if tree is None or type(tree) in (bool, int, str):
        return tree
    if type(tree) is float or (isinstance(tree, float) and type(tree).__module__ == "numpy"):
        # NumPy's of the same bits, as a rate by np.cos is, comes back as Python's.
        tree = float(tree)
        return tree if math.isfinite(tree) else {"float": str(tree)}
    if type(tree) in (list, tuple):
        parts = [pack(part, tensors, f"{path}/{k}") for k, part in enumerate(tree)]
        return parts if type(tree) is list else {"tuple": parts}
    if isinstance(tree, Mapping):
        pairs = [
            [pack(key, tensors, f"{path}/key"), pack(value, tensors, f"{path}/{key}")]
            for key, value in tree.items()
        ]
        return {"counter" if isinstance(tree, Counter) else "dict": pairs}
    raise TargetError(
        f"a checkpoint can't hold {path}: it is a {type(tree).__name__}, and only tensors, "
        "numbers, texts, lists and dicts of them are written. Train without checkpoints "
        "(--checkpoint-every 0), or with another optimizer or scheduler"
    )


def unpack(found: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The reverse of `pack`. Raises KeyError or ValueError for what it can't have made."""
    if isinstance(found, list):
        return [unpack(part, tensors) for part in found]
    if not isinstance(found, dict):
        return found
    ((kind, content),) = found.items()
    return _KINDS[kind](content, tensors)


def _mapping(pairs: Any, tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {unpack(key, tensors): unpack(value, tensors) for key, value in pairs}


_KINDS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "tensor": lambda name, tensors: tensors[name],
    "float": lambda text, tensors: float(text),
    "tuple": lambda parts, tensors: tuple(unpack(part, tensors) for part in parts),
    "dict": _mapping,
    "counter": lambda pairs, tensors: Counter(_mapping(pairs, tensors)),
}


# State of a worker ------------------------------------------------------------------------------

FORMAT = "timeprest-worker-state/1"
_RANDOM, _BUFFERS, _FROZEN, _DRIFT = "random", "buffers/", "frozen/", "drift/"
_TRAINED = "trained/"
_STEP = "step"


class WorkerState(TaggedFile, frozen=True, kw_only=True, tag=FORMAT):
    """Numbers of a worker's state; its tensors are in a file beside it.

    What the optimizer keeps goes by the names that the whole model has for its parameters.
    """

    updates: int
    """Made so far: the number of the weight version."""
    optimizer: str | None
    """Its class; None: nothing is trained here."""
    kept: Any = None
    """What it keeps for each parameter."""
    groups: Any = None
    """Its groups' options, the parameters left out."""
    own: Any = None
    """Instead of both, what its state_dict() gives, where it keeps more."""
    scheduler: Any = None
    scheduler_class: str | None = None
    """None: there is none, or it is an older state."""
    run_length: RunLength | None = None
    """Which the scheduler was made for; None: there is none, or it isn't known."""
    last_gradients: Any = None
    """Kept for predictions by runs of before; it is among what hooks keep now."""
    sums: EpochSums
    """Of the epoch that the checkpoint cuts."""
    logs: dict[str, int]
    """Bytes of the worker's own logs so far, by their paths in the run directory."""
    left_out: tuple[str, ...] = ()
    """What changed in plain attributes (`plain_attributes`), by name: it isn't here."""
    not_finite: tuple[int, ...] = ()
    beyond_profile: tuple[int, ...] = ()
    """Mini-batches so far, as of `StageReport`."""


def capture(
    stage: Stage,
    random: Tensor,
    sums: EpochSums,
    logs: dict[str, int],
    left_out: Sequence[str] = (),
) -> tuple[WorkerState, dict[str, Tensor]]:
    """The state of a worker, and its tensors by name.

    Args:
        random: state of its random numbers.
        left_out: names of what isn't in it.

    Raises TargetError where the user's optimizer or scheduler keeps what can't be written.
    """
    tensors = {_RANDOM: random}
    for name, buffer in stage.piece.module.named_buffers():
        # Replicas have their own, and some aren't among the weights.
        tensors[_BUFFERS + name] = buffer
    given = stage.weights.given
    for name, p in frozen_parameters(stage).items() if given else ():
        if mark_of(p) != given[name]:
            tensors[_FROZEN + name] = p
    optimizer, scheduler = stage.updates.optimizer, stage.updates.scheduler
    names: dict[Any, str] = {p: name for name, p in known_parameters(stage).items()}
    for key, kept in stage.hooks.states():
        tensors |= {_kept_as(key) + names[p]: tensor for p, tensor in kept.items()}
    if has_modes(optimizer):
        # The weights of a checkpoint are for use.
        tensors |= {_TRAINED + name: p.detach() for p, name in names.items()}
    parts = {} if optimizer is None else keep(optimizer, names, tensors)
    state_dict = None if scheduler is None else getattr(scheduler.rule, "state_dict", None)
    if scheduler is not None and state_dict is None:
        raise TargetError(
            f"a checkpoint can't hold the task's scheduler: {type(scheduler.rule).__name__} has no "
            "state_dict(). Give one of torch.optim.lr_scheduler's classes, or train without "
            "checkpoints (--checkpoint-every 0)"
        )
    return (
        WorkerState(
            updates=stage.weights.latest,
            optimizer=None if optimizer is None else type(optimizer).__name__,
            **parts,
            scheduler=pack(state_dict and state_dict(), tensors, "scheduler"),
            scheduler_class=None if scheduler is None else type(scheduler.rule).__name__,
            run_length=None if scheduler is None else scheduler.length,
            sums=sums,
            logs=logs,
            left_out=tuple(left_out),
        ),
        tensors,
    )


def keep(
    optimizer: Optimizer, names: Mapping[Any, str], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """What an optimizer has to be given to go on, as fields of a `WorkerState`; tensors are added
    to `tensors`.

    Args:
        names: the model's, of its parameters.

    Raises TargetError where it can't be written, or the optimizer's own state_dict() fails.
    """
    if has_own_state(optimizer):
        own = call_hook("optimizer", optimizer.state_dict, doing="state_dict()")
        return {"own": pack(own, tensors, "optimizer")}
    by_name = {names[p]: state for p, state in optimizer.state.items()}
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "kept": pack(dict(sorted(by_name.items())), tensors, "optimizer"),
        "groups": pack(options, tensors, "groups"),
    }


def give_back(
    optimizer: Optimizer,
    named: Mapping[str, nn.Parameter],
    state: WorkerState,
    tensors: Mapping[str, Tensor],
) -> None:
    """Give an optimizer over the same parameters what another one of its class kept (`keep`).

    Raises KeyError or ValueError for what isn't its, TargetError where its own
    load_state_dict() fails.
    """
    if state.own is not None:
        own = unpack(state.own, tensors)
        call_hook("optimizer", optimizer.load_state_dict, own, doing="load_state_dict()")
        train_mode(optimizer)
        return
    options = unpack(state.groups, tensors)
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        group.update(saved)
    # Where steps are counted depends on the options.
    give_kept(optimizer, named, unpack(state.kept, tensors))


def check_updates(updates: StageUpdates, state: WorkerState) -> None:
    """Raise ValueError for the state of a stage whose updates were made by others than these."""
    optimizer, scheduler = updates.optimizer, updates.scheduler
    own = None if optimizer is None else type(optimizer).__name__
    rule = None if scheduler is None else type(scheduler.rule).__name__
    had_rule = state.scheduler_class
    if had_rule is None and state.scheduler is not None:
        had_rule = rule or "one"
    found: list[tuple[str, object, object]]
    found = [("optimizer", state.optimizer, own), ("scheduler", had_rule, rule)]
    if optimizer is not None and state.groups is not None:
        groups = len(state.groups), len(optimizer.param_groups)
        found.append(("number of parameter groups", *groups))
    for what, had, now in found:
        if had != now:
            raise ValueError(
                f"its {what} was {had}, and is {now} now; put the task back as it was, or start "
                "another run by tp-run PLAN --from RUN"
            )


def restore(stage: Stage, state: WorkerState, tensors: Mapping[str, Tensor]) -> Tensor:
    """Give a stage this state, its weights left out. Returns that of its random numbers.

    Raises KeyError or ValueError for a state that isn't this stage's.
    """
    check_updates(stage.updates, state)
    optimizer, scheduler = stage.updates.optimizer, stage.updates.scheduler
    buffers, frozen = dict(stage.piece.module.named_buffers()), frozen_parameters(stage)
    for name, tensor in tensors.items():
        if name.startswith(_BUFFERS):
            write(buffers[name.removeprefix(_BUFFERS)], tensor)
        elif name.startswith(_FROZEN):
            write(frozen[name.removeprefix(_FROZEN)], tensor)
    every = (stage.weights, *(tied.versions for tied in stage.ties.updated))
    for versions in every:
        versions.latest = state.updates
    named = known_parameters(stage)
    if optimizer is not None:
        give_back(optimizer, named, state, tensors)
        for versions in every:
            versions.keep_memory()
    for name, p in named.items():
        if _TRAINED + name in tensors:
            p.detach().copy_(tensors[_TRAINED + name])
    if scheduler is not None:
        go_on(scheduler, unpack(state.scheduler, tensors), state.run_length)
    before = {LAST: unpack(state.last_gradients, tensors) or {}}
    for key, kept in stage.hooks.states():
        for name, p in named.items():
            where = _kept_as(key) + name
            if p in kept:
                kept[p].copy_(tensors[where])
            elif (found := tensors.get(where, before.get(key, {}).get(name))) is not None:
                # Predictions have some from the first update on.
                kept[p] = put(found, stage.piece.device)
    return tensors[_RANDOM]


def _kept_as(key: str) -> str:
    """Where the tensors are that weights are corrected by, or that a system from outside keeps."""
    return f"{_DRIFT}{key}/" if key else _DRIFT


def give_kept(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter], kept: Mapping[str, Any]
) -> None:
    """Give an optimizer what one kept for each parameter, by the model's names for them.

    Parameters that it doesn't have are left out. What its options ask for, and that one's didn't,
    begins at 0, as torch's own optimizers begin it together with the rest.
    """
    on_device = {
        p
        for group in optimizer.param_groups
        if group.get("capturable") or group.get("fused")
        for p in group["params"]
    }
    for name, p in named.items():
        if name in kept:
            optimizer.state[p] = {
                # Torch counts steps on the CPU, but for optimizers that run on the device alone.
                key: value if key == _STEP and p not in on_device else put(value, p.device)
                for key, value in kept[name].items()
            }
    for group in optimizer.param_groups:
        asked = [
            key
            for key, (kind, option) in _BY_OPTION.items()
            if isinstance(optimizer, kind) and group.get(option)
        ]
        for p in group["params"]:
            for key in asked if optimizer.state.get(p) else ():
                optimizer.state[p].setdefault(key, torch.zeros_like(p))


_BY_OPTION = {
    "max_exp_avg_sq": (torch.optim.Adam, "amsgrad"),
    "momentum_buffer": (torch.optim.RMSprop, "momentum"),
    "grad_avg": (torch.optim.RMSprop, "centered"),
}
"""What optimizers keep only with an option, and look for wherever they have kept anything."""


def frozen_parameters(stage: Stage) -> dict[str, nn.Parameter]:
    """The parameters of a stage that nobody trains, as its piece calls them."""
    return {name: p for name, p in stage.piece.module.named_parameters() if not p.requires_grad}


def known_parameters(stage: Stage) -> dict[str, nn.Parameter]:
    """The parameters that a stage updates, by the first names that the whole model has for them."""
    updated = set(map(id, stage.updated))
    named = model_parameters(stage.piece.module, stage.names)
    return {name: p for name, p in named if id(p) in updated}
