"""How a run starts: checks before it begins, and the weights: new, or from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

import msgspec
from torch import Tensor, nn

from ...planner.plan import Plan, read_plan
from ...profiles.errors import FileError, UserError
from ...profiles.files import check_regular, file_errors
from ...profiles.tracing.call import mark_of
from ..prepare.prepare import Prepared
from ..prepare.tied_parameters import state_of, write
from ..prepare.workers import Replica
from ..records.metrics import EpochSums
from ..records.operation_log import read_stage_epochs, record_named
from ..records.progress import read_progress
from ..records.run_dir import RunDir, load_weights, read_tensors
from ..settings import RunSettings
from ..stage.optimizer import StageUpdates, check_choice, looked_at
from ..stage.runner import StageRunner
from ..stage.stage import Stage
from .checkpoint import (
    Saved,
    find_whole,
    plan_checksum,
    settings_checksum,
)
from .learning_rate import go_on
from .worker_state import (
    WorkerState,
    frozen_parameters,
    give_kept,
    known_parameters,
    restore,
    unpack,
)


def check_settings(settings: RunSettings) -> RunSettings:
    """The same, with paths made absolute. Raises UserError when they contradict each other."""
    if settings.optimizer is not None:
        check_choice(settings.optimizer)
    record_named(settings.record)
    if settings.eval_every is not None and not settings.evaluate:
        raise UserError("--eval-every: goes with --evaluate")
    if settings.warmup and settings.lr_schedule is None:
        raise UserError("--warmup: goes with an --lr-schedule")
    if settings.start_from is not None:
        start = Path(settings.start_from).absolute()
        settings = msgspec.structs.replace(settings, start_from=str(start))
    return settings


def check_unfinished(prepared: Prepared, where: RunDir) -> None:
    """Raise UserError when a run that is to be resumed has nothing left to do, or can't go on."""
    settings = prepared.settings
    done = settings.resume_at or 0
    # One that was killed after its last checkpoint still has its weights and summary to write.
    if prepared.segments[-1].end <= done and where.summary.exists():
        raise UserError(
            f"{where.path}: this run has ended, after {done} mini-batches"
            + "; for more, give "
            + (f"--steps above {done}" if settings.steps else f"--epochs above {settings.epochs}")
        )
    if not done:
        return
    saved = Saved(where.checkpoints.folder(done))
    then = (done, saved.info.epoch, saved.info.epoch_mini_batches)
    if then not in {(s.end, s.epoch, s.offset + s.mini_batches) for s in prepared.segments}:
        raise UserError(
            f"{where.path}: the training data have another length than before, when mini-batch "
            f"{done} was the {then[2]}. of epoch {then[1] + 1}: put them back as they were, or "
            f"start another run from the weights: tp-run PLAN --from {where.path}"
        )


def check_rates(prepared: Prepared, where: RunDir) -> list[str]:
    """Warnings of the learning rates that a run which goes on would have.

    Not for runs on GPUs whose optimizers can't be made here: the workers find out.

    Raises TargetError for a scheduler that ends before the run does.
    """
    settings = prepared.settings
    if not settings.resume_at or settings.lr_schedule is not None:
        return []
    saved = Saved(where.checkpoints.folder(settings.resume_at))
    with looked_at(prepared):
        for s in range(len(prepared.model.pieces)):
            name = f"state/stage{s}"
            if not (saved.path / f"{name}.json").exists():
                continue
            state, scheduler = saved.worker_state(f"stage{s}"), None
            with suppress(UserError):
                scheduler = StageUpdates(prepared, s).scheduler
            if scheduler is None or state.scheduler is None:
                continue
            with suppress(KeyError, ValueError, AttributeError):
                # The worker says so where it isn't its state.
                found = _scheduler_state(saved, name, state)
                line = go_on(scheduler, found, state.run_length)
                return [] if line is None else [line]
            return []
    return []


def _scheduler_state(saved: Saved, name: str, state: WorkerState) -> Any:
    try:
        return unpack(state.scheduler, {})
    except KeyError:
        # Hardly any has tensors; the file has the optimizer's, too.
        return unpack(state.scheduler, saved.tensors(f"{name}.safetensors"))


def settings_to_resume(
    where: RunDir,
    plan: Plan,
    settings: RunSettings,
    *,
    epochs: int | None,
    steps: int | None,
    at: int | None,
) -> RunSettings:
    """The settings of a run that goes on at its newest checkpoint, or at its beginning.

    Args:
        epochs, steps: in all, where there are to be more.
        at: mini-batches done at another checkpoint.

    Raises:
        FileError: the checkpoint is broken.
        UserError: it is of another plan or other settings than the run directory holds, or
            `epochs` or `steps` say less than before.
    """
    where.check_kinds()
    found = find_whole(where, at, lambda place: f"--resume-at {place}")
    if found is None and at is not None:
        raise UserError(f"--resume-at {at}: {where.path} has no checkpoints")
    if found is None and where.summary.exists():
        raise UserError(
            f"{where.path}: this run has ended, and it has no checkpoints to go on from"
        )
    own = "epochs" if settings.steps is None else "steps"
    before: int = getattr(settings, own)
    for name, asked in (("epochs", epochs), ("steps", steps)):
        if asked is None:
            continue
        if name != own:
            raise UserError(f"--{name}: this run is of --{own} {before}, which may grow")
        if asked < before:
            raise UserError(
                f"--{name} {asked}: the run was to have {before}; there may be more, not fewer"
            )
        grown = (before,) if own == "steps" and asked > before else ()
        settings = msgspec.structs.replace(
            settings, grown_at=(*settings.grown_at, *grown), **{name: asked}
        )
    if found is None:
        return msgspec.structs.replace(settings, resume_at=0, grown_at=())
    for file, now, then in (
        ("plan.json", plan_checksum(plan), found.info.plan),
        ("settings.json", settings_checksum(settings), found.info.settings),
    ):
        if now != then:
            raise UserError(
                f"{where.path / file}: isn't what {found.path} was made with; to start another "
                f"run from its weights: tp-run PLAN --from {where.path}"
            )
    done = found.info.mini_batches
    grown_at = tuple(end for end in settings.grown_at if end <= done)
    return msgspec.structs.replace(settings, resume_at=done, grown_at=grown_at)


def check_logs(where: RunDir, settings: RunSettings, replicas: Sequence[Replica]) -> None:
    """Refuse to go on with a run whose figures so far are damaged, before anything is changed.

    Args:
        replicas: whose logs are looked at.

    Raises FileError that names the line.
    """
    for replica in replicas:
        noted = noted_sizes(where, settings, replica)
        _check_log(where, where.stage_metrics(replica), noted, read_stage_epochs)
        if replica.is_reporter:
            _check_log(where, where.metrics, noted, read_progress)


def _check_log(
    where: RunDir, path: Path, noted: Mapping[str, int], read: Callable[..., Iterable[object]]
) -> None:
    """What a log had at the checkpoint must be there still; what came later is cut off."""
    size = noted.get(str(path.relative_to(where.path)), 0)
    if not size:
        return
    have = path.stat().st_size if path.exists() else 0
    if have < size:
        raise FileError(f"{path}: has {have} bytes, and had {size} at the checkpoint; {_GONE}")
    try:
        list(read(path, size))
    except FileError as error:
        raise FileError(f"{error}; {_GONE}") from None


_GONE = "put the file back as it was, or start another run from the weights: tp-run PLAN --from RUN"


def noted_sizes(where: RunDir, settings: RunSettings, replica: Replica) -> Mapping[str, int]:
    """Bytes of a replica's logs at the checkpoint that a run is resumed from, by their paths."""
    if not settings.resume_at:
        return {}
    return Saved(where.checkpoints.folder(settings.resume_at)).worker_state(replica.file).logs


def left_out(where: RunDir, settings: RunSettings) -> list[str]:
    """What a run that is resumed doesn't get back of what changed in plain attributes: what the
    workers here said of it in the checkpoint."""
    if not settings.resume_at:
        return []
    saved = Saved(where.checkpoints.folder(settings.resume_at))
    states = [name for name in saved.info.files if Path(name).match("state/*.json")]
    here = [Path(name).stem for name in states if (saved.path / name).exists()]
    return sorted({name for stem in here for name in saved.worker_state(stem).left_out})


def rewind_logs(where: RunDir, settings: RunSettings, replica: Replica) -> None:
    """Cut a replica's own logs to what they were at the checkpoint that a run is resumed from.

    Raises FileError.
    """
    if settings.resume_at is None:
        return
    noted = noted_sizes(where, settings, replica)
    logs = [where.operations(replica), where.recorded(replica), where.stage_metrics(replica)]
    if replica.is_reporter:
        logs.append(where.metrics)
    for path in logs:
        size = noted.get(str(path.relative_to(where.path)), 0)
        if os.path.lexists(path):
            check_regular(path, _GONE)
        with file_errors(path, "written"):
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)


def restore_worker(
    where: RunDir, settings: RunSettings, runner: StageRunner
) -> tuple[Tensor, EpochSums] | None:
    """Put a worker where the run starts.

    Returns the state of its random numbers and its sums; None where they are new.

    Raises FileError for a file that is broken, or of another model.
    """
    replica = runner.replica
    if not settings.resume_at:
        if settings.start_from is not None:
            start_from(runner, Path(settings.start_from))
        _remember_frozen(runner)
        return None
    saved = Saved(where.checkpoints.folder(settings.resume_at))
    name = f"weights/stage{replica.stage}.safetensors"
    weights, state = saved.tensors(name), saved.worker_state(replica.file)
    tensors = saved.tensors(f"state/{replica.file}.safetensors")
    try:
        random = put_back(runner, weights, state, tensors, str(saved.path / name))
    except (KeyError, ValueError, RuntimeError) as error:
        raise FileError(f"{saved.path}: isn't a state of this {replica.name}: {error}") from error
    return random, state.sums


def put_back(
    runner: StageRunner,
    written: Mapping[str, Tensor],
    state: WorkerState,
    tensors: Mapping[str, Tensor],
    where: str,
) -> Tensor:
    """Give a worker what a checkpoint has of it.

    Args:
        written: the weights of its stage, as the file has them.
        where: names that file in messages.

    Returns the state of its random numbers.

    Raises FileError as `give_weights`, KeyError, ValueError or RuntimeError as `restore`.
    """
    weights = runner.prepared.model.as_named(written)
    give_weights(runner.stage, weights, where)
    _give_unused(runner, weights)
    _remember_frozen(runner)
    return restore(runner.stage, state, tensors)


def _remember_frozen(runner: StageRunner) -> None:
    """Have checkpoints hold a replica's own of the parameters that nobody trains, where its
    forwards make others of them than the first replica has, whose are the weights."""
    if not runner.replica.leads:
        frozen = frozen_parameters(runner.stage).items()
        runner.stage.weights.given = {name: mark_of(p) for name, p in frozen}


def start_from(runner: StageRunner, path: Path) -> None:
    """Give a worker the weights of another run and, parameter by parameter, what its optimizer
    kept, where that was of the same class.

    Args:
        path: a run directory (its newest checkpoint counts, or its final weights), a
            checkpoint's, or a safetensors file with weights alone.

    Raises FileError when it isn't one of these, or the weights are another model's.
    """
    stage = runner.stage
    weights, named, saved = _weights_of(runner.prepared, path)
    give_weights(stage, weights, named)
    _give_unused(runner, weights)
    optimizer = stage.updates.optimizer
    if saved is not None and optimizer is not None:
        own = type(optimizer).__name__
        kept = saved.kept()
        mine = {name: state for name, (kind, state) in kept.items() if kind == own}
        give_kept(optimizer, known_parameters(stage), mine)


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


def give_weights(stage: Stage, weights: Mapping[str, Tensor], where: str) -> None:
    """Write weights by the model's names into a stage's parameters and buffers.

    Parameters that another stage of the worker updates are left to that one.

    Args:
        where: names their file in messages.

    Raises FileError when one is missing or has another shape.
    """
    elsewhere = stage.names_elsewhere
    for mine, found in _matched(stage.piece.module, stage.names, weights, where, elsewhere):
        write(mine, found)


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
    if saved is not None and (own := saved.with_own_state()):
        lines.append(
            f"--from {path}: what its optimizer, a {own}, keeps in a state_dict of its own stays "
            "behind: the new run's begins anew on the weights"
        )
    return lines


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
            raise FileError(f"{where}: has no {name!r}: are these weights of another model?")
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


def _give_unused(runner: StageRunner, weights: Mapping[str, Tensor]) -> None:
    """The same for what no stage uses, so that it is written again as it was."""
    for name, mine in runner.prepared.model.unused.items():
        if name in weights and weights[name].shape == mine.shape:
            write(mine, weights[name])
