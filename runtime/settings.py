"""Settings of a run: everything that isn't the plan's. Data only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ..planner.plan import Plan
from ..profiles import plugins
from ..profiles.errors import UserError
from ..profiles.files import (
    MAX_FACTOR,
    MAX_SECONDS,
    Count,
    Factor,
    TaggedFile,
    Tally,
    Threads,
    converted,
)
from ..profiles.options import Option, check_names, chosen, given, marked, option_fields, read_field
from ..profiles.units import real_number, shown

FORMAT = "timeprest-run/1"

STEADY = "steady:8"
"""What is recorded unless the user says otherwise."""

Fraction = Annotated[float, Meta(ge=0, lt=1)]

TRAINING = "Training"
OPTIMIZER = "Optimizer and learning rate"
PRECISION = "Precision"
DIFFERENCES = "Version differences"
WHERE = "Where it runs"
RECORDS = "Records"
CHECKPOINTS = "Checkpoints and restarts"
"""Headings of the options' help."""


def _betas(value: Any, name: str) -> tuple[float, float]:
    """``"0.9,0.999"`` → (0.9, 0.999). Raises UserError."""
    try:
        first, second = (float(part) for part in str(value).split(","))
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ValueError
    except ValueError:
        raise UserError(f"{name} {value!r}: give two numbers from 0 to 1, like 0.9,0.999") from None
    return first, second


def _autocast(value: Any, name: str) -> str:
    """Raises UserError for a dtype that isn't there."""
    return chosen("bfloat16" if value == "bf16" else value, name, ("profiled", "bfloat16", "off"))


TRANSPORTS = ("auto", "gloo", "shm", "ipc", "nccl")
"""Of `--transport`; plugins may have others."""


def known_transport(value: object, name: str) -> str:
    """Raises UserError for one that neither we nor a plugin has."""
    if value in TRANSPORTS:
        return str(value)
    return chosen(value, name, (*TRANSPORTS, *plugins.names("transports")))


class OptimizerChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An optimizer named on the command line instead of the task's own."""

    name: Annotated[
        str, Option(OPTIMIZER, flags=("--optimizer",), values=("sgd", "adam", "adamw", "muon"))
    ]
    """Instead of the task's own; needs --lr. muon: of matrices of hidden layers; else adamw."""
    lr: Annotated[float, Meta(gt=0, le=MAX_FACTOR), Option(OPTIMIZER)]
    """Learning rate."""
    momentum: Annotated[Fraction, Option(OPTIMIZER, usual="0; 0.95")] = 0.0
    """Of sgd; of muon."""
    weight_decay: Annotated[Factor, Option(OPTIMIZER, usual="0")] = 0.0
    """Of the optimizer that is named."""
    nesterov: Annotated[bool, Option(OPTIMIZER)] = False
    """Nesterov momentum, of sgd."""
    betas: Annotated[
        tuple[Fraction, Fraction] | None,
        Option(OPTIMIZER, usual="0.9,0.999", metavar="B1,B2", read=_betas),
    ] = None
    """Of adam, adamw and muon's."""


class RunSettings(TaggedFile, frozen=True, kw_only=True, tag=FORMAT):
    """A run's settings; workers read them from the run directory. Checksums of checkpoints hold
    their sequence."""

    most: ClassVar[int] = 2**20

    task: Annotated[str, Option(TRAINING, usual="what the plan's profile measured", names="target")]
    """Built-in task, file.py:NAME or pkg.module:NAME."""
    epochs: Annotated[Count, Option(TRAINING, usual="5", marks=("free",))] = 1
    """Passes over the data."""
    steps: Annotated[Count | None, Option(TRAINING, marks=("free",))] = None
    """Mini-batches in all, instead of --epochs."""
    optimizer: OptimizerChoice | None = None
    """None: the task's own."""
    decay_only: Annotated[Literal["matrices", "all"], Option(OPTIMIZER)] = "all"
    """Parameters with weight decay; matrices: biases and norms have none."""
    lr_schedule: Annotated[Literal["constant", "linear", "cosine"] | None, Option(OPTIMIZER)] = None
    """Instead of the task's own scheduler; linear and cosine fall to 0 by the run's end."""
    warmup: Annotated[Tally, Option(OPTIMIZER)] = 0
    """Updates over which the learning rate of --lr-schedule rises."""
    lr_rescheduling: Annotated[
        Tally | None,
        Option(
            DIFFERENCES,
            usual="0; pipemare: a quarter of the updates",
            metavar="T",
            marks=("later", "delay"),
        ),
    ] = 0
    """Divide the learning rate of a stage's update t by d^(1 - min(t/T, 1)), d its version
    difference (PipeMare). 0: don't. Not where the system flushes."""
    discrepancy_correction: Annotated[bool, Option(DIFFERENCES, marks=("later", "delay"))] = True
    """pipemare: correct the backward's weights by their mean change."""
    discrepancy_decay: Annotated[
        float, Meta(gt=0, lt=1), Option(DIFFERENCES, metavar="D", marks=("later", "delay"))
    ] = 0.135
    """pipemare: a change's share in that mean falls to D by the time of the backward."""
    stagewise_momentum: Annotated[bool, Option(DIFFERENCES, marks=("later", "delay"))] = False
    """Momentum m + d*(0.99 - m)/S on a stage with version difference d (asynchronous Nesterov's).
    Not where the system flushes."""
    clip_norm: Annotated[Annotated[float, Meta(gt=0, le=MAX_FACTOR)] | None, Option(PRECISION)] = (
        None
    )
    """Clip gradients of the whole model to this norm."""
    ragged: Annotated[Literal["drop", "pad", "error"], Option(TRAINING)] = "drop"
    """Samples that don't fill an epoch's last mini-batch: leave them out, fill the mini-batch up
    (the filling counts nowhere), or refuse to run."""
    autocast: Annotated[
        Literal["profiled", "bfloat16", "off"],
        Option(
            PRECISION,
            usual="as profiled",
            values=("bf16", "bfloat16", "off"),
            read=_autocast,
        ),
    ] = "profiled"
    """Run forwards under torch.autocast."""
    compile: Annotated[bool, Option(WHERE, marks=("later",))] = False
    """Train each stage under torch.compile, where it can be; the summary says where not."""
    graphs: Annotated[
        Literal["auto", "on", "off"], Option(WHERE, marks=("free", "adjustable", "later"))
    ] = "auto"
    """Capture each stage's passes as CUDA graphs, where they can be; the summary says where not.
    auto: on GPUs."""
    deterministic: Annotated[bool, Option(WHERE, marks=("later",))] = False
    """Have torch take operations that give the same numbers every time, where it has such, and warn
    of those where it hasn't; on GPUs some add up in whatever sequence they come to."""
    deferred_batch_norm: Annotated[bool, Option(PRECISION)] = False
    """Update BatchNorm's running statistics once for each mini-batch."""
    checkpoint_every: Annotated[
        Tally | None, Option(CHECKPOINTS, usual="at the end of each epoch")
    ] = None
    """Mini-batches between two checkpoints; the pipeline drains there. 0: none."""
    keep_checkpoints: Annotated[Count, Option(CHECKPOINTS, marks=("free", "adjustable"))] = 3
    """How many of them are kept, the newest."""
    start_from: Annotated[
        str | None, Option(TRAINING, flags=("--from",), metavar="RUN", names="file")
    ] = None
    """Start from the weights and optimizer state of another run's newest checkpoint, of one of its
    checkpoints, or from a safetensors file; its stages and system may be others."""
    resume_at: Tally | None = None
    """Mini-batches done when the run was resumed, those of one of its checkpoints; None: it wasn't
    resumed."""
    grown_at: tuple[Count, ...] = ()
    """Mini-batches after which the run had ended, before it was to have more `steps`."""
    seed: Annotated[Tally, Option(TRAINING)] = 0
    """Of whatever is random."""
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Option(WHERE, marks=("free", "adjustable"))
    ] = "auto"
    """What the stages compute on; auto: what the plan was profiled on."""
    transport: Annotated[
        str,
        Option(
            WHERE, values=TRANSPORTS, plugins="transports", read=known_transport, marks=("free",)
        ),
    ] = "auto"
    """How messages go; auto: on the CPU by shared memory, between hosts by gloo; on GPUs by CUDA
    IPC, between hosts by NCCL."""
    threads: Annotated[Threads, Option(WHERE, usual="as profiled")] = 1
    """Torch's threads for each stage."""
    evaluate: Annotated[bool, Option(TRAINING)] = True
    """Evaluate on the test data after each epoch."""
    eval_every: Annotated[Count | None, Option(TRAINING, marks=("later",))] = None
    """Evaluate every so many mini-batches too; the pipeline drains there."""
    on_nan: Annotated[
        Literal["stop", "warn", "skip"], Option(TRAINING, marks=("free", "adjustable"))
    ] = "stop"
    """A loss or gradients that aren't finite: end the run, count them and go on, or leave that
    update out too."""
    timeout_s: Annotated[
        float,
        Meta(gt=0, le=MAX_SECONDS),
        Option(
            WHERE,
            usual="25, or 100 periods; with --compile 600",
            flags=("--timeout",),
            marks=("free", "adjustable"),
        ),
    ] = 60.0
    """Longest wait for a message, in seconds."""
    decay: Annotated[Literal["exponential", "inverse", "linear"], Option(DIFFERENCES)] = (
        "exponential"
    )
    """i-timeprest: how the forward's weights fade with the version difference."""
    decay_rate: Annotated[Factor, Option(DIFFERENCES, flags=("--lambda",))] = 1.0
    """i-timeprest: how fast they fade."""
    distances: Annotated[bool, Option(RECORDS)] = True
    """Measure how far apart the weights of forwards and backwards are."""
    log_operations: Annotated[bool, Option(RECORDS, marks=("free", "adjustable"))] = False
    """Write every operation with its weight version and times to RUN/operations."""
    record: Annotated[str, Option(RECORDS, metavar="WHICH", marks=("free", "adjustable"))] = STEADY
    """Mini-batches whose operations are kept for tp-run report: first:K, last:K, steady:K (once the
    pipeline is full), all or none."""
    log: Annotated[str, Option(RECORDS, metavar="WHERE", marks=("free", "adjustable", "later"))] = (
        ""
    )
    """Metrics of every mini-batch for other programs too: csv, tensorboard, wandb, or several with
    commas. They go to RUN/dashboards."""
    dropout: bool = True
    """False: nothing drops out in training, and samples have the random numbers that are theirs in
    any stage and micro-batch, so that runs can be held against each other."""
    keep_gradients: bool = False
    """Write the gradients that every update steps with to gradients/."""

    @property
    def resumed(self) -> bool:
        """Whether the run goes on where it was stopped."""
        return self.resume_at is not None


ADJUSTABLE = marked(RunSettings, "adjustable")
"""Settings that a resumed run may have otherwise than before, besides its length."""

FREE = ("grown_at", "resume_at", *marked(RunSettings, "free"))
"""Settings that don't change what is trained up to a checkpoint."""

DELAYS = marked(RunSettings, "delay")
"""Settings of what a stage's version difference does to its training."""

LATER = marked(RunSettings, "later")
"""Settings that runs of before didn't have; the default is what they did."""

COMPILING_S = 600.0
"""Longest wait for a message, where stages may have to be compiled first."""


def without_effect(
    settings: RunSettings, plan: Plan, updates: int, *, inline: bool
) -> Iterator[str]:
    """Lines on what was asked for and does nothing in this run.

    Args:
        updates: of the run.
    """
    variant = plan.system
    late = plan.predicted.version_difference
    if settings.lr_rescheduling and late < 2:
        yield (
            "--lr-rescheduling: is for version differences above 1, and does nothing in this plan "
            f"of {variant.name}, whose largest is {late}"
        )
    if settings.stagewise_momentum and not late:
        yield (
            "--stagewise-momentum: is for version differences, and does nothing in this plan of "
            f"{variant.name}, which has none"
        )
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
        **({"lr_rescheduling": None} if plan.system.rescheduled else {}),
    }
    return _made({**defaults, **_read(asked)})


def changed(settings: RunSettings, changes: Mapping[str, Any]) -> RunSettings:
    """The settings with other values of these fields. Raises as `settings_of`."""
    return _made({**msgspec.to_builtins(settings), **_read(changes)})


def _read(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What is meant by each, but None where nothing is given. Raises UserError."""
    fields = option_fields(RunSettings)
    known = [*fields, "optimizer"]
    for name in asked:
        if name in option_fields(OptimizerChoice):
            raise UserError(
                f'{name}: is the optimizer\'s: optimizer={{"name": "adam", "lr": 1e-3}}, which is '
                "taken instead of the task's own"
            )
    check_names(asked, known, "setting")
    optimizer = asked.get("optimizer")
    if not isinstance(optimizer, (Mapping, OptimizerChoice, NoneType)):
        raise UserError(
            f'optimizer: give its name and settings, {{"name": "adam", "lr": 1e-3}}, not '
            f"{shown(optimizer)}"
        )
    return {
        name: read_field(fields[name], value, name) if name in fields else value
        for name, value in asked.items()
        if value is not None
    }


def _as_in_files(value: object) -> object:
    """Another library's number, of an optimizer's in Python."""
    number = real_number(value)
    if number is None:
        raise UserError(f"settings: {shown(value)}: give a number, a text, True or False")
    return number


def _made(fields: Mapping[str, Any]) -> RunSettings:
    return converted(msgspec.to_builtins(fields, enc_hook=_as_in_files), RunSettings, "settings")
