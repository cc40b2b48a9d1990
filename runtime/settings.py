"""Settings of a run: everything that isn't the plan's. Data only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from os import PathLike, fspath
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ..planner.plan import Plan
from ..planner.systems.variants import Variant
from ..profiles.errors import UserError
from ..profiles.files import (
    MAX_COUNT,
    MAX_FACTOR,
    MAX_SECONDS,
    Count,
    Factor,
    TaggedFile,
    Threads,
)
from ..profiles.units import real_number, shown

FORMAT = "timeprest-run/1"

STEADY = "steady:8"
"""What is recorded unless the user says otherwise."""

Fraction = Annotated[float, Meta(ge=0, lt=1)]


class OptimizerChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An optimizer named on the command line instead of the task's own."""

    name: str
    """sgd, adam, adamw or muon."""
    lr: Annotated[float, Meta(gt=0, le=MAX_FACTOR)]
    momentum: Fraction = 0.0
    """Of sgd and muon; 0 is torch's own for muon."""
    weight_decay: Factor = 0.0
    nesterov: bool = False
    betas: tuple[Fraction, Fraction] | None = None
    """Of adam, adamw and muon's AdamW; None: torch's own."""


class RunSettings(TaggedFile, frozen=True, kw_only=True, tag=FORMAT):
    """A run's settings; workers read them from the run directory."""

    most: ClassVar = 2**20

    task: str
    """Target of the task: `digits`, `file.py:task`."""
    epochs: Count = 1
    steps: Count | None = None
    """Mini-batches in all; where given, it ends the run instead of `epochs`."""
    optimizer: OptimizerChoice | None = None
    """None: the task's own."""
    decay_only: Literal["matrices", "all"] = "all"
    """Which parameters have weight decay: with "matrices" those of two dimensions or more, so
    that biases and norms have none."""
    lr_schedule: Literal["constant", "linear", "cosine"] | None = None
    """None: the task's own scheduler, where it has one."""
    warmup: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    """Updates over which the learning rate of `lr_schedule` rises."""
    lr_rescheduling: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    """T of PipeMare's learning-rate rescheduling: updates over which a stage's rate rises from
    one d-th of it, d its version difference; 0: it is all there from the first."""
    discrepancy_correction: bool = True
    """Of pipemare: backwards run on weights that are corrected by their mean change."""
    discrepancy_decay: Annotated[float, Meta(gt=0, lt=1)] = 0.135
    """D of PipeMare: how much of a change is left in the mean after as many updates as lie
    between a forward and its backward."""
    stagewise_momentum: bool = False
    """The larger a stage's version difference, the larger its momentum."""
    clip_norm: Annotated[float, Meta(gt=0, le=MAX_FACTOR)] | None = None
    """Largest norm that a mini-batch's gradient may have."""
    ragged: Literal["drop", "pad", "error"] = "drop"
    """Samples that don't fill an epoch's last mini-batch: leave them out, fill the mini-batch up
    (the filling counts nowhere), or refuse to run."""
    autocast: Literal["profiled", "bfloat16", "off"] = "profiled"
    """What forwards run under: torch.autocast with this dtype, or what the profile was made
    with."""
    compile: bool = False
    """Run the forwards and backwards of stages compiled by torch.compile, where they can be."""
    deterministic: bool = False
    """Have torch take operations that give the same numbers every time, where it has such; it warns
    of those where it hasn't. On GPUs some add up in whatever sequence they come to."""
    deferred_batch_norm: bool = False
    """Update the running statistics of batch norms once for each mini-batch, with its own."""
    checkpoint_every: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    """Mini-batches between two checkpoints, at each of which the pipeline drains; None: at the end
    of every epoch; 0: never."""
    keep_checkpoints: Count = 3
    """How many are kept, the newest ones."""
    start_from: str | None = None
    """Run or checkpoint directory, or safetensors file, whose weights the training starts from."""
    resume_at: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    """Mini-batches done when the run was resumed, those of one of its checkpoints; None: it wasn't
    resumed."""
    grown_at: tuple[Count, ...] = ()
    """Mini-batches after which the run had ended, before it was to have more `steps`."""
    seed: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What stages compute on; auto: what the plan was profiled on."""
    transport: Literal["auto", "gloo", "shm", "ipc", "nccl"] = "auto"
    """How messages go between stages. On the CPU, auto: through shared memory where all workers are
    on one host, by gloo else. On GPUs, auto: by CUDA IPC from GPU to GPU between workers of one
    host, by NCCL between hosts; gloo: through pinned memory of the hosts."""
    threads: Threads = 1
    evaluate: bool = True
    eval_every: Count | None = None
    """Mini-batches between two evaluations, besides those at the ends of epochs; the pipeline
    drains at each."""
    on_nan: Literal["stop", "warn", "skip"] = "stop"
    """A loss or gradients that aren't finite: end the run, count them and go on, or leave that
    update out too."""
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_SECONDS)] = 60.0
    """Longest wait for a message, before the run is given up."""
    decay: str = "exponential"
    """σ of i-timeprest: exponential, inverse or linear in the version difference."""
    decay_rate: Factor = 1.0
    """λ, σ's parameter."""
    distances: bool = True
    """Measure how far apart the weights of forwards and backwards are (`staleness`)."""
    log_operations: bool = False
    """Write every operation with its weight version and times to operations/."""
    record: str = STEADY
    """Which mini-batches' operations to write to recorded/ for the report, where not all are
    written to operations/ (`record`)."""
    log: str = ""
    """Where to write metrics step by step, besides metrics.jsonl: some of csv, tensorboard and
    wandb, with commas between them (`records.metric_logs`)."""
    dropout: bool = True
    """False: nothing drops out in training, and samples have the random numbers that are theirs in
    any stage and micro-batch, so that runs can be held against each other."""
    keep_gradients: bool = False
    """Write the gradients that every update steps with to gradients/."""

    @property
    def resumed(self) -> bool:
        """Whether the run goes on where it was stopped."""
        return self.resume_at is not None


ADJUSTABLE = (
    *("device", "keep_checkpoints", "log", "log_operations", "on_nan", "record", "timeout_s"),
)
"""Settings that a resumed run may have otherwise than before, besides its length."""

DELAYS = (
    *("lr_rescheduling", "stagewise_momentum"),
    *("discrepancy_correction", "discrepancy_decay"),
)
"""Settings of what a stage's version difference does to its training."""

LATER = (*DELAYS, "compile", "deterministic", "eval_every", "log")
"""Settings that runs of before didn't have; the default is what they did."""

COMPILING_S = 600.0
"""Longest wait for a message, where stages may have to be compiled first."""


def given(settings: RunSettings, names: Collection[str] = DELAYS) -> dict[str, object]:
    """Of these, the settings that aren't the default."""
    return {
        field.name: value
        for field in msgspec.structs.fields(settings)
        if field.name in names and (value := getattr(settings, field.name)) != field.default
    }


def without_effect(
    settings: RunSettings, variant: Variant, updates: int, *, inline: bool
) -> Iterator[str]:
    """Lines on what was asked for and does nothing in this run.

    Args:
        updates: of the run.
    """
    if given(settings, ("decay", "decay_rate")) and variant.backward_weights != "intermediate":
        yield f"--decay, --lambda: are of i-timeprest, and do nothing in {variant.name}"
    corrections = ("discrepancy_correction", "discrepancy_decay")
    if given(settings, corrections) and variant.backward_weights != "corrected":
        yield (
            "--discrepancy-decay, --no-discrepancy-correction: are of pipemare, and do nothing in "
            f"{variant.name}"
        )
    if given(settings, ("keep_checkpoints",)) and settings.checkpoint_every == 0:
        yield "--keep-checkpoints: there are none with --checkpoint-every 0"
    if given(settings, ("transport",)) and inline:
        yield "--transport: nothing is sent with --inline"
    if settings.lr_schedule is not None and settings.warmup > updates:
        yield (
            f"--warmup {settings.warmup}: the run has {updates} updates, so that the learning rate "
            "never comes to its full height"
        )


def settings_of(plan: Plan, asked: Mapping[str, Any]) -> RunSettings:
    """The settings of a new run: `asked` has fields, None where not given.

    Five epochs of the task that the plan's profile measured, unless it says otherwise.

    Raises UserError for a field that there isn't, or a value that can't be.
    """
    if asked.get("epochs") is not None and asked.get("steps") is not None:
        raise UserError("epochs, steps: give one of them")
    least = COMPILING_S if asked.get("compile") else 25.0
    defaults = {
        "task": plan.profile.target,
        "epochs": 5,
        "threads": plan.profile.threads,
        "timeout_s": min(max(least, 100 * plan.predicted.period_s), MAX_SECONDS),
    }
    given = {name: value for name, value in asked.items() if value is not None}
    return _made({**defaults, **given})


def changed(settings: RunSettings, changes: Mapping[str, Any]) -> RunSettings:
    """The settings with other values of these fields. Raises as `settings_of`."""
    return _made({**msgspec.to_builtins(settings), **changes})


def _as_in_files(value: object) -> object:
    """A path, or another library's number, of an argument in Python."""
    if isinstance(value, PathLike):
        return fspath(value)
    number = real_number(value)
    if number is None:
        raise UserError(f"settings: {shown(value)}: give a number, a text, True or False")
    return number


def _made(fields: Mapping[str, Any]) -> RunSettings:
    try:
        return msgspec.convert(msgspec.to_builtins(fields, enc_hook=_as_in_files), RunSettings)
    except msgspec.ValidationError as error:
        raise UserError(f"settings: {error}") from None
