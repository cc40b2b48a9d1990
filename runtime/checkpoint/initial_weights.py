"""Weights that a run starts from: of another run, of a checkpoint, or of a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from textwrap import shorten

from torch import Tensor, nn

from ...planner.plan import read_plan
from ...profiles.errors import FileError, UserError
from ..prepare.prepared import Prepared
from ..prepare.tied_parameters import state_of, write
from ..records.run_dir import RunDir, load_weights, read_tensors
from ..stage.optimizer import StageUpdates, looked_at
from ..stage.runner import StageRunner
from .checkpoint import Saved, find_whole, plan_checksum
from .worker_state import give_kept, known_parameters


def source(path: Path, at: int | None = None, option: str = "--from {path}") -> Saved | None:
    """The checkpoint that a path means, whole; None: there are weights alone.

    Args:
        at: one of a run's checkpoints instead of the newest, by its mini-batches.
        option: how the user names an older one, with {path} and {at} in it.

    Raises FileError: there is nothing at all, or what there is is broken.
    """
    if path.is_file():
        return None
    if (path / "checkpoint.json").exists():
        saved = Saved(path)
        saved.verify()
        return saved
    where = RunDir(path)
    if not path.is_dir():
        raise FileError(f"{path}: no such run directory, checkpoint or safetensors file")
    found = find_whole(
        where, at, lambda place: option.format(path=where.checkpoints.folder(place), at=place)
    )
    if found is None and not list(path.glob("weights/*.safetensors")):
        raise FileError(f"{path}: holds no checkpoint and no weights")
    plan = path / "plan.json"
    if found is not None and plan.exists() and plan_checksum(read_plan(plan)) != found.info.plan:
        raise FileError(
            f"{found.path}: was written by another plan than {plan}: it isn't this run's; name the "
            "run that it is of"
        )
    return found


def check_start(prepared: Prepared, path: Path) -> list[str]:
    """Refuse weights that the run can't start from, before it has a directory. Raises FileError.

    Args:
        path: as for `start_from`.

    Returns:
        Warnings: of weights that the model has no use for, and of what an optimizer kept that
        doesn't go along.
    """
    weights, named, saved = _weights_of(prepared, path)
    model = prepared.model
    known = {*model.names, *model.names.values(), *model.unused}
    for piece in model.pieces:
        known |= state_of(piece.module).keys()
        _matched(piece.module, model.names, weights, named)
    lines = []
    if left := [name for name in weights if name not in known]:
        some = shorten(", ".join(left), 120, placeholder=" …")
        lines.append(f"--from {path}: the model has no weights of these names: {some}")
    for kind, own in {} if saved is None else saved.optimizers().items():
        other = None if own else _of_other_class(prepared, kind)
        if own or other:
            lines.append(
                f"--from {path}: what its optimizer, a {kind}, keeps "
                + ("in a state_dict of its own " * own)
                + f"stays behind: the new run's{f', a {other},' * (not own)} begins anew on the "
                "weights"
            )
    return lines


def _of_other_class(prepared: Prepared, kind: str) -> str | None:
    """The class of the run's optimizer, where that isn't of this one; None where it can't be made
    here, too."""
    with looked_at(prepared):
        for s in range(len(prepared.model.pieces)):
            with suppress(UserError):
                optimizer = StageUpdates(prepared, s).optimizer
                if optimizer is not None:
                    own = type(optimizer).__name__
                    return None if own == kind else own
    return None


def start_from(runner: StageRunner, path: Path) -> None:
    """Give a worker the weights of another run and, parameter by parameter, what its optimizer
    kept, where that was of the same class.

    Args:
        path: a run directory (its newest checkpoint counts, or its final weights), a
            checkpoint's, or a safetensors file with weights alone.

    Raises FileError when it isn't one of these, or the weights are another model's.
    """
    weights, named, saved = _weights_of(runner.prepared, path)
    give_weights(runner, weights, named)
    optimizer = runner.stage.updates.optimizer
    if saved is not None and optimizer is not None:
        own = type(optimizer).__name__
        kept = saved.kept()
        mine = {name: state for name, (kind, state) in kept.items() if kind == own}
        give_kept(optimizer, known_parameters(runner.stage), mine)


def give_weights(runner: StageRunner, weights: Mapping[str, Tensor], where: str) -> None:
    """Write weights by the model's names into a stage's parameters and buffers, and into what no
    stage uses, so that it is written again as it was. Parameters that another stage of the worker
    updates are left to that one.

    Raises FileError, which calls their file `where`, when one is missing or has another shape.
    """
    model, module = runner.prepared.model, runner.stage.piece.module
    elsewhere = model.names_elsewhere(runner.number)
    for mine, found in _matched(module, model.names, weights, where, elsewhere):
        write(mine, found)
    for name, mine in model.unused.items():
        if name in weights and weights[name].shape == mine.shape:
            write(mine, weights[name])


def _weights_of(prepared: Prepared, path: Path) -> tuple[dict[str, Tensor], str, Saved | None]:
    """Weights of all stages by the model's names, their place, and the checkpoint, if they are from
    one."""
    saved = source(path)
    if saved is not None:
        found, where = saved.weights(), str(saved.path)
    else:
        found, where = read_tensors(path) if path.is_file() else load_weights(path), str(path)
    return prepared.model.as_named(found), where, saved


def _matched(
    module: nn.Module,
    names: Mapping[str, str],
    weights: Mapping[str, Tensor],
    where: str,
    elsewhere: Collection[str] = (),
) -> list[tuple[Tensor, Tensor]]:
    """Each of a module's parameters and buffers, but for those with names `elsewhere`, with what is
    to be written into it."""
    known = {names.get(name, name): tensor for name, tensor in weights.items()}
    matched = []
    for name, mine in state_of(module).items():
        if name in elsewhere:
            continue
        found = weights.get(name, known.get(names.get(name, name)))
        if found is None:
            # As wrappers name them: DDP, torch.compile.
            near = [n for n in weights if n.endswith(f".{name}") or name.endswith(f".{n}")]
            why = (
                f"but {near[0]!r}: give its tensors the model's names"
                if near
                else "are these weights of another model?"
            )
            raise FileError(f"{where}: has no {name!r}, {why}")
        if found.shape != mine.shape:
            raise FileError(
                f"{where}: {name!r} has shape {list(found.shape)}, and {list(mine.shape)} in this "
                "model"
            )
        if (found.is_floating_point(), found.is_complex()) != (
            mine.is_floating_point(),
            mine.is_complex(),
        ):
            raise FileError(
                f"{where}: {name!r} is of {str(found.dtype)[6:]}, and of {str(mine.dtype)[6:]} in "
                "this model"
            )
        matched.append((mine, found))
    return matched
