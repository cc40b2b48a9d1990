"""The options of tp-run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ..profiles.limits import MAX_FACTOR, MAX_THREADS
from .common import Number, Whole

_OPTIONS = (
    click.option(
        "--task",
        help="Built-in task, file.py:NAME or pkg.module:NAME.  "
        "[default: what the plan's profile measured]",
    ),
    click.option("--epochs", type=Whole(), help="[default: 5]"),
    click.option("--steps", type=Whole(), help="Mini-batches in all, instead of --epochs."),
    click.option(
        "--ragged",
        type=click.Choice(["drop", "pad", "error"]),
        default="drop",
        show_default=True,
        help="Samples that don't fill an epoch's last mini-batch.",
    ),
    click.option(
        "--optimizer",
        type=click.Choice(["sgd", "adam", "adamw"]),
        help="Instead of the task's own; needs --lr.",
    ),
    click.option("--lr", type=Number(0, MAX_FACTOR, min_open=True)),
    click.option("--momentum", type=Number(0, 1, max_open=True)),
    click.option("--nesterov", is_flag=True, help="Nesterov momentum, of sgd."),
    click.option("--betas", metavar="B1,B2", help="Of adam and adamw.  [default: 0.9,0.999]"),
    click.option("--weight-decay", type=Number(0, MAX_FACTOR)),
    click.option(
        "--decay-only",
        type=click.Choice(["matrices", "all"]),
        default="all",
        show_default=True,
        help="Parameters with weight decay; matrices: biases and norms have none.",
    ),
    click.option(
        "--lr-schedule",
        type=click.Choice(["constant", "linear", "cosine"]),
        help="Instead of the task's own scheduler; linear and cosine fall to 0 by the run's end.",
    ),
    click.option("--warmup", type=Whole(0), help="Updates over which the learning rate rises."),
    click.option(
        "--clip-norm",
        type=Number(0, MAX_FACTOR, min_open=True),
        help="Clip gradients of the whole model to this norm.",
    ),
    click.option(
        "--autocast",
        type=click.Choice(["bf16", "bfloat16", "off"]),
        help="Run forwards under torch.autocast.  [default: as profiled]",
    ),
    click.option(
        "--deferred-batch-norm",
        is_flag=True,
        help="Update BatchNorm's running statistics once for each mini-batch.",
    ),
    click.option("--seed", type=click.IntRange(0, 2**40), default=0, show_default=True),
    click.option(
        "--threads",
        type=click.IntRange(1, MAX_THREADS),
        help="Torch's threads for each stage.  [default: as profiled]",
    ),
    click.option(
        "--inline", is_flag=True, help="All stages in this process, with the same weight versions."
    ),
    click.option(
        "--evaluate/--no-evaluate",
        default=True,
        show_default=True,
        help="Evaluate on the test data after each epoch.",
    ),
    click.option(
        "--on-nan",
        type=click.Choice(["stop", "warn"]),
        default="stop",
        show_default=True,
        help="A loss or gradients that aren't finite: end the run, or count them and go on.",
    ),
    click.option(
        "--timeout",
        type=Number(0, MAX_FACTOR, min_open=True),
        help="Longest wait for a message, in seconds.  [default: 25, or 100 periods]",
    ),
    click.option(
        "--decay",
        type=click.Choice(["exponential", "inverse", "linear"]),
        default="exponential",
        show_default=True,
        help="i-timeprest: how the forward's weights fade with the version difference.",
    ),
    click.option(
        "--lambda",
        "decay_rate",
        type=Number(0, MAX_FACTOR),
        default=1.0,
        show_default=True,
        help="i-timeprest: how fast they fade.",
    ),
    click.option(
        "--distances/--no-distances",
        default=True,
        show_default=True,
        help="Measure how far apart the weights of forwards and backwards are.",
    ),
    click.option(
        "--log-operations",
        is_flag=True,
        help="Write every operation with its weight version and times to RUN/operations.",
    ),
    click.option(
        "--check",
        "checks",
        is_flag=True,
        help="Train --steps mini-batches (3 by default) once more without a pipeline, and say where "
        "loss, gradients and weights differ most. Keeps nothing without --run-dir.",
    ),
    click.option(
        "--dry-run",
        is_flag=True,
        help="Check all that the run needs, send a micro-batch's shapes over every cut, and stop.",
    ),
    click.option("--run-dir", help="[default: runs/VARIANT-DATE-TIME]"),
    click.option(
        "--checkpoint-every",
        type=Whole(0),
        help="Mini-batches between two checkpoints; the pipeline drains there. 0: none.  "
        "[default: at the end of each epoch]",
    ),
    click.option(
        "--keep-checkpoints",
        type=Whole(),
        default=3,
        show_default=True,
        help="How many of them are kept, the newest.",
    ),
    click.option(
        "--from",
        "start_from",
        metavar="RUN",
        help="Start from the weights and optimizer state of another run's newest checkpoint, of one "
        "of its checkpoints, or from a safetensors file; its stages and system may be others.",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Go on with the run in --run-dir from its newest checkpoint. --epochs may grow.",
    ),
    click.option(
        "--resume-at",
        type=Whole(),
        help="The same from another checkpoint, by the mini-batches done.",
    ),
    click.option(
        "--max-restarts",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="After a failure start again from the newest checkpoint, so many times at most.",
    ),
)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all of them, in this sequence."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
