"""The check of a pipelined run against the same training without a pipeline, on the user's model.

Systems that flush must be plain training; the others are held against their own inline run.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from ...planner.plan import Plan
from ...profiles.autograd.dropout import HeldStatistics
from ...profiles.errors import TaskWarning, UserError
from ...profiles.measuring.process_settings import one_at_a_time, settings_put_back
from ..prepare.devices import device_kind
from ..prepare.prepare import prepare
from ..prepare.prepared import Prepared
from ..records.progress import Observer, read_losses
from ..records.run_dir import RunDir, load_weights
from ..run import run
from ..settings import RunSettings
from ..training.plain import PlainTraining
from .causes import why_not_one_by_one, why_not_whole
from .compare import TOLERANCES, Difference, TrainingResults, compare, weight_spread

STEPS = 3
"""Mini-batches that a check trains where nothing else is said."""

WHOLE = "whole mini-batches"
HELD = "whole mini-batches, batch norms held"
ONE_BY_ONE = "micro-batches one by one"
INLINE = "the inline run"

SPREAD = 4.0
"""Final weights may differ by so many times what two plain runs that round otherwise do."""

_DROPOUT = "dropout is switched off on both sides: each stage would draw its own random numbers"
_MIXES = (
    "a batch norm takes its statistics over {m} samples, a micro-batch, not over the mini-batch's "
    "{b}: the verdict is on the same micro-batches one by one"
)
_STATISTICS = (
    "running statistics of batch norms come from replica 0's samples alone where a stage has "
    "several, and aren't compared there"
)
_SAME_NUMBERS = (
    "{who} random numbers besides dropout's: both sides have the same, by sample and by the call "
    "that draws them; a run draws others in each stage"
)
_DRAWS = (
    "the model draws random numbers besides dropout's, each stage its own, and they can't be made "
    "the same{why}: differences can come from that"
)
_LOSS_DRAWS = (
    "the task's loss draws random numbers{why}, others for each micro-batch and in one process: "
    "differences can come from that"
)
_STEP_DRAWS = (
    "the task's optimizer draws random numbers (noise on gradients), each stage its own: weights "
    "differ by that after the first update, and losses after it"
)
_HIDDEN = " by NumPy's or Python's own generators"


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """A run held against one other training."""

    what: str
    """WHOLE, HELD, ONE_BY_ONE or INLINE."""
    differences: tuple[Difference, ...]
    counts: bool = True
    """For the verdict."""

    @property
    def same(self) -> bool:
        """Whether all that counts passes for rounding."""
        return all(difference.same for difference in self.differences if difference.counts)


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found."""

    variant: str
    mode: str
    """"processes" or "inline"."""
    mini_batches: int
    plain: bool
    """Held against training without a pipeline; else against the inline run."""
    dtype: str
    tolerance: float
    against: tuple[Against, ...]
    notes: tuple[str, ...]
    verdict: str
    """"same" or "differs"."""


@one_at_a_time
def check(
    plan: Plan,
    settings: RunSettings,
    *,
    run_dir: str | Path | None = None,
    inline: bool = False,
    observer: Observer | None = None,
) -> CheckReport:
    """Train a few mini-batches by the plan and once more without a pipeline, and compare.

    Args:
        settings: `steps` mini-batches are trained, STEPS where that isn't given; nothing is
            evaluated.
        run_dir: keeps the pipelined run; None: everything goes to a temporary directory.
        inline: all stages in this process; for systems that flush.

    Raises:
        UserError: an inline check of a system that doesn't flush, or settings with `start_from`.
        As `run.run`.
    """
    flushes = plan.system.flushes
    if settings.start_from is not None:
        raise UserError("--check: trains anew; leave --from (start_from) out")
    if inline and not flushes:
        raise UserError(
            f"--check --inline: {plan.variant} isn't plain training, so its processes are held "
            "against the inline run; leave --inline out"
        )
    settings = msgspec.structs.replace(
        settings,
        steps=settings.steps or STEPS,
        evaluate=False,
        eval_every=None,
        keep_gradients=True,
        checkpoint_every=0,
        dropout=settings.dropout and not flushes,
        # Adam makes as much of a gradient of nothing but rounding as of any other.
        deterministic=True,
    )
    observer = observer or Observer()
    prepared = prepare(plan, settings, observer.starting)
    with settings_put_back(), tempfile.TemporaryDirectory(prefix="timeprest-check-") as made:
        folder = Path(made)
        where = RunDir(run_dir or folder / "run")
        run(plan, settings, where.path, inline=inline, observer=observer)
        found = _training_of(where, prepared)
        tolerance, dtype = _tolerance(prepared)
        observer.starting(f"training the same {'without a pipeline' if flushes else 'inline'}")
        hold = _against_plain if flushes else _against_inline
        against, notes = hold(prepared, found, folder, tolerance)
    same = all(one.same for one in against if one.counts)
    return CheckReport(
        variant=plan.variant,
        mode="inline" if inline else "processes",
        mini_batches=sum(segment.mini_batches for segment in prepared.segments),
        plain=flushes,
        dtype=dtype,
        tolerance=tolerance,
        against=tuple(against),
        notes=tuple(notes),
        verdict="same" if same else "differs",
    )


def _against_inline(
    prepared: Prepared, found: TrainingResults, folder: Path, tolerance: float
) -> tuple[list[Against], list[str]]:
    other = RunDir(folder / "inline")
    # What is compiled is held against what isn't.
    plainly = msgspec.structs.replace(prepared.settings, compile=False, transport="auto")
    with warnings.catch_warnings():
        # They have been told.
        warnings.simplefilter("ignore", TaskWarning)
        run(prepared.plan, plainly, other.path, inline=True)
    differences = compare(found, _training_of(other, prepared), tolerance)
    # What the inline run has in common with processes, neither of them tells.
    return [Against(what=INLINE, differences=differences)], [*prepared.cautions]


def _against_plain(
    prepared: Prepared, found: TrainingResults, folder: Path, tolerance: float
) -> tuple[list[Against], list[str]]:
    plan = prepared.plan
    whole = PlainTraining(prepared, folder / "whole", by_micro_batch=False)
    whole.run()
    traits = whole.traits
    notes = [_DROPOUT] if traits.drops else []
    notes += _random_numbers(whole, prepared)
    if traits.mixes and any(len(stage.devices) > 1 for stage in plan.stages):
        notes.append(_STATISTICS)
        # Replicas don't share them.
        dropped = {
            name
            for stage, piece in zip(plan.stages, prepared.model.pieces, strict=True)
            if len(stage.devices) > 1
            for name, _ in piece.module.named_buffers()
        }
        kept = {name: tensor for name, tensor in found.state.items() if name not in dropped}
        found = replace(found, state=kept)
    by_whole = _plain_training(whole, folder / "whole", prepared)
    if plan.micro_batches == 1:
        return [Against(what=WHOLE, differences=compare(found, by_whole, tolerance))], notes
    single = PlainTraining(prepared, folder / "single", by_micro_batch=True)
    single.run()
    one_by_one = _plain_training(single, folder / "single", prepared)
    # What rounding alone does to weights shows where the two plain runs mean the same.
    spread = {} if traits.mixes else weight_spread(by_whole.state, one_by_one.state)
    spread = {name: SPREAD * off for name, off in spread.items()}
    against = [
        Against(
            what=WHOLE,
            differences=compare(found, by_whole, tolerance, drifts=True),
            counts=not traits.mixes,
        ),
        Against(what=ONE_BY_ONE, differences=compare(found, one_by_one, tolerance, spread=spread)),
    ]
    if traits.mixes:
        notes.append(_MIXES.format(m=plan.micro_batch, b=plan.mini_batch))
        # Whether that is all which makes a mini-batch another one.
        against.insert(1, _held(prepared, folder, tolerance))
    if not against[-1].same:

        def same_within(context: Callable[[nn.Module], AbstractContextManager[None]]) -> bool:
            other = PlainTraining(prepared, folder / "again", by_micro_batch=True)
            with context(other.model):
                other.run()
            others = _plain_training(other, folder / "again", prepared)
            return all(one.same for one in compare(found, others, tolerance, spread=spread))

        notes += why_not_one_by_one(prepared, same_within)
    elif not all(one.same for one in against[:-1] if one.counts):
        notes += why_not_whole(
            prepared,
            tolerance,
            lambda context: _held(prepared, folder, tolerance, context).same,
        )
    return against, notes


def _random_numbers(plain: PlainTraining, prepared: Prepared) -> list[str]:
    traits, numbers = plain.traits, plain.numbers
    notes = [_LOSS_DRAWS.format(why=_HIDDEN)] if traits.loss_hides else []
    notes += [_STEP_DRAWS] if traits.step_random else []
    if numbers is not None and not numbers.beyond:
        who = "the model draws" if numbers.calls.in_forward else "the task's loss draws"
        return [_SAME_NUMBERS.format(who=who), *notes]
    why = " (--compile)" if prepared.settings.compile else ""
    notes += [_DRAWS.format(why=why)] if traits.random else []
    return notes + ([_LOSS_DRAWS.format(why=why)] if traits.loss_random else [])


def _held(
    prepared: Prepared,
    folder: Path,
    tolerance: float,
    context: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
) -> Against:
    """Plain training on micro-batches against that on the whole mini-batch, for one mini-batch,
    with batch norms that do the same to both. `context`: what both run within."""
    first = prepared.segments[0]
    samples = min(first.samples, first.mini_batch)
    segment = replace(first, mini_batches=1, samples=samples, rest=0, offset=0)
    one, found = replace(prepared, segments=(segment,)), []
    for name in ("held-whole", "held-single"):
        plain = PlainTraining(one, folder / name, by_micro_batch=name == "held-single")
        with HeldStatistics(), context(plain.model):
            plain.run()
        found.append(_plain_training(plain, folder / name, one))
    whole, single = found
    return Against(what=HELD, differences=compare(single, whole, tolerance, drifts=True))


def _training_of(where: RunDir, prepared: Prepared) -> TrainingResults:
    folders = [where.gradients(s) for s in range(len(prepared.model.pieces))]
    losses = read_losses(where.metrics)
    return TrainingResults(losses, folders, load_weights(where.path), _updates(prepared))


def _plain_training(plain: PlainTraining, folder: Path, prepared: Prepared) -> TrainingResults:
    return TrainingResults(plain.losses, [folder], plain.state(), _updates(prepared))


def _updates(prepared: Prepared) -> list[int]:
    """The mini-batch before each update."""
    return [
        segment.first + b
        for segment in prepared.segments
        for b in range(segment.mini_batches)
        if segment.updates_after(b)
    ]


def _tolerance(prepared: Prepared) -> tuple[float, str]:
    """The tolerance of the least precise dtype of parameters and autocast, and its name."""
    modules = [piece.module for piece in prepared.model.pieces]
    parameters = [p for module in modules for p in module.parameters()]
    dtypes = {p.dtype.to_real() for p in parameters}
    if prepared.model.autocast is not None:
        dtypes.add(prepared.model.autocast)
    known = [dtype for dtype in dtypes if dtype in TOLERANCES] or [torch.float32]
    dtype = max(known, key=lambda dtype: TOLERANCES[dtype])
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.float32 and device_kind(prepared.plan, prepared.settings) == "cuda":
        # It rounds as float16 does. Without being asked for, torch takes it where cuDNN computes.
        by_cudnn = any(p.dim() > 2 for p in parameters) or any(
            isinstance(part, nn.RNNBase) for module in modules for part in module.modules()
        )
        if _allows_tf32(torch.backends.cuda.matmul) or (
            by_cudnn and _allows_tf32(torch.backends.cudnn)
        ):
            return TOLERANCES[torch.float16], f"{name} (TF32)"
    return TOLERANCES[dtype], name


def _allows_tf32(backend: Any) -> bool:
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:  # it was set in another way, which this name can't tell
        return True
