"""How a run starts: checks before it begins, and each worker put where it was at a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from ...planner.plan import Plan
from ...profiles.errors import FileError, UserError
from ...profiles.tracing.call import mark_of
from ..prepare.prepared import Prepared
from ..records.metrics import EpochSums
from ..records.operation_log import record_named
from ..records.run_dir import RunDir
from ..settings import RunSettings
from ..stage.optimizer import StageUpdates, check_choice, looked_at
from ..stage.runner import StageRunner
from .checkpoint import Saved, find_whole, plan_checksum, settings_checksum
from .initial_weights import give_weights, start_from
from .learning_rate import go_on
from .worker_state import WorkerState, check_updates, frozen_parameters, restore, unpack


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
    then, had = (done, saved.info.epoch, saved.info.epoch_mini_batches), saved.info.samples
    # Of a stream nobody knows more than the run's steps take of it.
    of_steps = (settings.steps or 0) * prepared.plan.mini_batch
    other = had not in (msgspec.UNSET, prepared.samples) and prepared.samples != of_steps
    places = {(s.end, s.epoch, s.offset + s.mini_batches) for s in prepared.segments}
    if other or then not in places:
        raise UserError(
            f"{where.path}: the training data have another length than before, when mini-batch "
            f"{done} was the {then[2]}. of epoch {then[1] + 1}"
            + f" of {had} samples; they have {prepared.samples} now"
            * other
            + ": put them back as they were, or start another run from the weights: "
            f"tp-run PLAN --from {where.path}"
        )


def check_task(prepared: Prepared, where: RunDir) -> list[str]:
    """Warnings of the learning rates that a run which goes on would have, and of options that the
    task's optimizer has otherwise than the checkpoint's, which counts.

    Not for runs on GPUs whose optimizers can't be made here: the workers find out.

    Raises FileError for a checkpoint of another optimizer or scheduler, TargetError for a scheduler
    that ends before the run does.
    """
    settings, lines = prepared.settings, list[str]()
    if not settings.resume_at:
        return []
    saved = Saved(where.checkpoints.folder(settings.resume_at))
    with looked_at(prepared):
        for s in range(len(prepared.model.pieces)):
            name = f"state/stage{s}"
            if not (saved.path / f"{name}.json").exists():
                continue
            state, updates = saved.worker_state(f"stage{s}"), None
            with suppress(UserError):
                updates = StageUpdates(prepared, s)
            if updates is None:
                continue
            try:
                check_updates(updates, state)
            except ValueError as error:
                raise _not_its_state(saved, f"stage {s}", error) from None
            lines += [line for line in _other_options(updates, state) if line not in lines]
            if updates.scheduler is None or settings.lr_schedule is not None:
                continue
            with suppress(KeyError, ValueError, AttributeError):
                # The worker says so where it isn't its state.
                found = _scheduler_state(saved, name, state)
                line = go_on(updates.scheduler, found, state.run_length)
                lines += [line] if line is not None and line not in lines else []
    return lines


def _other_options(updates: StageUpdates, state: WorkerState) -> Iterator[str]:
    # Classes of the user's may change theirs as they step.
    if updates.optimizer is None or state.groups is None or not _is_torchs(updates.optimizer):
        return
    # What a scheduler sets goes by the rate that it began with.
    scheduler = updates.scheduler
    compared = [("lr", "lr" if scheduler is None else "initial_lr")]
    if scheduler is None or _is_torchs(scheduler.rule):
        compared.append(("weight_decay", "weight_decay"))
    # A rate may be a tensor.
    with suppress(KeyError):
        for had, group in zip(
            unpack(state.groups, {}), updates.optimizer.param_groups, strict=True
        ):
            for name, key in compared:
                if had.get(key) != group.get(key):
                    yield (
                        f"the task's optimizer has {name} {group.get(key)} now, and the run goes "
                        f"on with its checkpoint's, {had.get(key)}; with another one: tp-run PLAN "
                        "--from RUN"
                    )


def _is_torchs(found: Any) -> bool:
    return type(found).__module__.startswith("torch.optim.")


def _not_its_state(saved: Saved, name: str, why: Exception) -> FileError:
    return FileError(f"{saved.path}: isn't a state of this {name}: {why}")


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


def left_out(where: RunDir, settings: RunSettings) -> list[str]:
    """What a run that is resumed doesn't get back of what changed in plain attributes: what the
    workers here said of it in the checkpoint."""
    if not settings.resume_at:
        return []
    saved = Saved(where.checkpoints.folder(settings.resume_at))
    states = [name for name in saved.info.files if Path(name).match("state/*.json")]
    here = [Path(name).stem for name in states if (saved.path / name).exists()]
    return sorted({name for stem in here for name in saved.worker_state(stem).left_out})


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
        raise _not_its_state(saved, replica.name, error) from error
    return random, state.sums


def put_back(
    runner: StageRunner,
    written: Mapping[str, Tensor],
    state: WorkerState,
    tensors: Mapping[str, Tensor],
    where: str,
) -> Tensor:
    """Give a worker what a checkpoint has of it: the weights of its stage as they are `written` in
    a file, which messages call `where`, and its state. Returns that of its random numbers.

    Raises FileError as `give_weights`, KeyError, ValueError or RuntimeError as `restore`.
    """
    weights = runner.prepared.model.as_named(written)
    give_weights(runner, weights, where)
    _remember_frozen(runner)
    runner.gradients.not_finite.mini_batches = [*state.not_finite]
    runner.data.beyond_profile = [*state.beyond_profile]
    return restore(runner.stage, state, tensors)


def _remember_frozen(runner: StageRunner) -> None:
    """Have checkpoints hold a replica's own of the parameters that nobody trains, where its
    forwards make others of them than the first replica has, whose are the weights."""
    if not runner.replica.leads:
        frozen = frozen_parameters(runner.stage).items()
        runner.stage.weights.given = {name: mark_of(p) for name, p in frozen}
