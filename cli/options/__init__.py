"""Options of the commands: those that all have, and those of clusters and runs.

Options that set a field of `RunSettings` bear its name, as `settings_of` takes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

import click
import msgspec

from ... import __version__
from ...planner.cluster.cluster import (
    DEFAULT_BANDWIDTH,
    DEFAULT_LATENCY,
    MAX_DEVICES,
    Cluster,
    read_cluster,
    uniform_cluster,
)
from ...planner.systems.variants import load_plugin
from ...profiles.errors import UserError
from ...profiles.files import MAX_FACTOR, MAX_THREADS
from ...runtime.settings import OptimizerChoice, RunSettings
from ..errors import errors_as_lines
from .command import group, options
from .config import CLUSTER_FLAGS, CONFIG, PRINT
from .values import FileName, FolderName, Fraction, Number, TargetName, Whole

F = TypeVar("F", bound=Callable[..., Any])

CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True}
"""Settings of every command."""


def choice(
    flag: str, values: Iterable[str], default: str | None = None, help: str | None = None
) -> Callable[[F], F]:
    """An option that takes one of a few words."""
    return click.option(flag, type=click.Choice(list(values)), default=default, help=help)


version_option = click.version_option(__version__, package_name="timeprest", message="%(version)s")
"""--version, of each command and of those that have others below them."""

quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print errors only.")

common_options = options(
    click.option("-v", "--verbose", is_flag=True, help="Print more."),
    quiet_option,
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    version_option,
)


_plugins = click.option(
    "--plugin",
    "plugins",
    type=FileName(),
    multiple=True,
    metavar="FILE",
    help="A file with training systems of your own; plans of theirs need it.",
)


def plugin_option(function: F) -> F:
    """--plugin, whose systems are there when the command begins."""

    @functools.wraps(function)
    def wrapped(*args: Any, plugins: Sequence[str], **kwargs: Any) -> Any:
        errors_as_lines(_load)(plugins)
        return function(*args, **kwargs)

    return cast("F", _plugins(wrapped))


def _load(plugins: Sequence[str]) -> None:
    for plugin in plugins:
        load_plugin(plugin)


config_options = group(
    "Configuration",
    click.option(
        "--config",
        CONFIG,
        type=FileName(),
        expose_value=False,
        help="Options from a TOML file, by their long names; the command line wins.",
    ),
    click.option(
        "--print-config",
        PRINT,
        is_flag=True,
        expose_value=False,
        help="Print all options as such a file, and stop.",
    ),
)


def time_limit_option(help: str | None = None) -> Callable[[F], F]:
    """--time-limit of a search, 60 seconds by default."""
    kind = Number(0, MAX_FACTOR)
    return click.option(
        "--time-limit", "time_limit_s", type=kind, default=60.0, metavar="SECONDS", help=help
    )


# A cluster: a file, or equal devices by flags -----------------------------------------------------

_DEFAULT_DEVICES = 2

cluster_options = group(
    "Devices and links",
    click.option(
        "--cluster",
        "cluster_path",
        type=FileName(),
        metavar="TOML",
        help="Devices and links from a file.",
    ),
    click.option(
        "--devices",
        type=Whole(1, MAX_DEVICES),
        help=f"Number of equal devices.  [default: {_DEFAULT_DEVICES}]",
    ),
    click.option("--memory", help="Limit of each device, like 16GiB.  [default: none]"),
    click.option("--bandwidth", help=f"Between devices.  [default: {DEFAULT_BANDWIDTH}]"),
    click.option("--latency", help=f"Of a message.  [default: {DEFAULT_LATENCY}]"),
    click.option(
        "--per-machine",
        type=Whole(1, MAX_DEVICES),
        help="Devices in a machine.  [default: all]",
    ),
    click.option("--between-bandwidth", help="Between machines.  [default: --bandwidth]"),
    click.option("--between-latency", help="Between machines.  [default: --latency]"),
    click.option("--half-duplex", is_flag=True, help="A link carries one direction at a time."),
    click.option("--no-overlap", is_flag=True, help="Devices don't compute while they transfer."),
)
"""--cluster, or --devices and what they and their links are like; read by `cluster_of`."""


def cluster_of(asked: dict[str, Any]) -> Cluster:
    """The cluster that the options describe; takes them out of `asked`. Raises UserError."""
    path = asked.pop("cluster_path")
    given = {
        name: value for name in CLUSTER_FLAGS if (value := asked.pop(name)) not in (None, False)
    }
    if path is not None:
        if given:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise UserError(f"--cluster: leave out {flag}; the file says it")
        return read_cluster(path)
    if "per_machine" not in given and {"between_bandwidth", "between_latency"} & set(given):
        raise UserError("--between-bandwidth, --between-latency: say --per-machine too")
    devices = given.pop("devices", _DEFAULT_DEVICES)
    return uniform_cluster(devices, overlap=not given.pop("no_overlap", False), **given)


# A training run -----------------------------------------------------------------------------------

_FIELDS = {field.name: field for field in msgspec.structs.fields(RunSettings)}


def _setting(name: str, *flags: str, **more: Any) -> Callable[[F], F]:
    """The option of a field of `RunSettings`: its default, and its values where they are named."""
    field = _FIELDS[name]
    if get_origin(field.type) is Literal:
        more["type"] = click.Choice(get_args(field.type))
    flags = flags or ("--" + name.replace("_", "-"),)
    return click.option(*flags, name, default=field.default, **more)


task_options = options(
    click.option(
        "--task",
        type=TargetName(),
        help="Built-in task, file.py:NAME or pkg.module:NAME.  "
        "[default: what the plan's profile measured]",
    ),
    _setting("ragged", help="Samples that don't fill an epoch's last mini-batch."),
)
"""What is trained on, and how its samples are dealt."""

optimizer_options = group(
    "Optimizer and learning rate",
    choice(
        "--optimizer",
        ("sgd", "adam", "adamw", "muon"),
        None,
        "Instead of the task's own; needs --lr. muon: of matrices of hidden layers; else adamw.",
    ),
    click.option("--lr", type=Number(0, MAX_FACTOR, above=True), help="Learning rate."),
    click.option(
        "--momentum", type=Fraction(max_open=True), help="Of sgd; of muon.  [default: 0; 0.95]"
    ),
    click.option("--nesterov", is_flag=True, default=None, help="Nesterov momentum, of sgd."),
    click.option(
        "--betas", metavar="B1,B2", help="Of adam, adamw and muon's.  [default: 0.9,0.999]"
    ),
    click.option(
        "--weight-decay", type=Number(0, MAX_FACTOR), help="Of the optimizer that is named."
    ),
    _setting(
        "decay_only", help="Parameters with weight decay; matrices: biases and norms have none."
    ),
    choice(
        "--lr-schedule",
        ("constant", "linear", "cosine"),
        None,
        "Instead of the task's own scheduler; linear and cosine fall to 0 by the run's end.",
    ),
)
"""Read by `optimizer_choice`, but for --warmup, --decay-only and --lr-schedule."""

precision_options = group(
    "Precision",
    click.option(
        "--clip-norm",
        type=Number(0, MAX_FACTOR, above=True),
        help="Clip gradients of the whole model to this norm.",
    ),
    click.option(
        "--autocast",
        type=click.Choice(["bf16", "bfloat16", "off"]),
        callback=lambda context, option, dtype: "bfloat16" if dtype == "bf16" else dtype,
        help="Run forwards under torch.autocast.  [default: as profiled]",
    ),
    _setting(
        "deferred_batch_norm",
        is_flag=True,
        help="Update BatchNorm's running statistics once for each mini-batch.",
    ),
)

delay_options = group(
    "Version differences",
    _setting(
        "lr_rescheduling",
        type=Whole(0),
        metavar="T",
        help="Divide the learning rate of a stage's update t by d^(1 - min(t/T, 1)), d its version "
        "difference (PipeMare). 0: don't. Not where the system flushes.",
    ),
    _setting(
        "stagewise_momentum",
        is_flag=True,
        help="Momentum m + d*(0.99 - m)/S on a stage with version difference d (asynchronous "
        "Nesterov's). Not where the system flushes.",
    ),
    _setting(
        "discrepancy_correction",
        "--discrepancy-correction/--no-discrepancy-correction",
        help="pipemare: correct the backward's weights by their mean change.",
    ),
    _setting(
        "discrepancy_decay",
        type=Fraction(min_open=True, max_open=True),
        metavar="D",
        help="pipemare: a change's share in that mean falls to D by the time of the backward.",
    ),
)
"""Of what a stage's version difference does to its training."""

decay_options = group(
    "Version differences",
    _setting(
        "decay",
        type=click.Choice(["exponential", "inverse", "linear"]),
        help="i-timeprest: how the forward's weights fade with the version difference.",
    ),
    _setting(
        "decay_rate",
        "--lambda",
        type=Number(0, MAX_FACTOR),
        help="i-timeprest: how fast they fade.",
    ),
)
"""Of i-timeprest."""

run_options = options(
    group(
        "Training",
        task_options,
        click.option("--epochs", type=Whole(), help="Passes over the data.  [default: 5]"),
        click.option("--steps", type=Whole(), help="Mini-batches in all, instead of --epochs."),
        _setting("seed", type=Whole(0), help="Of whatever is random."),
        _setting(
            "evaluate",
            "--evaluate/--no-evaluate",
            help="Evaluate on the test data after each epoch.",
        ),
        _setting(
            "eval_every",
            type=Whole(),
            help="Evaluate every so many mini-batches too; the pipeline drains there.",
        ),
        _setting(
            "on_nan",
            help="A loss or gradients that aren't finite: end the run, count them and go on, or "
            "leave that update out too.",
        ),
        _setting(
            "start_from",
            "--from",
            type=FileName(),
            metavar="RUN",
            help="Start from the weights and optimizer state of another run's newest checkpoint, "
            "of one of its checkpoints, or from a safetensors file; its stages and system may be "
            "others.",
        ),
    ),
    optimizer_options,
    group(
        "Optimizer and learning rate",
        click.option("--warmup", type=Whole(0), help="Updates over which the learning rate rises."),
    ),
    precision_options,
    delay_options,
    decay_options,
    group(
        "Where it runs",
        _setting("device", help="What the stages compute on; auto: what the plan was profiled on."),
        _setting(
            "transport",
            help="How messages go; auto: on the CPU by shared memory, between hosts by gloo; on "
            "GPUs by CUDA IPC, between hosts by NCCL.",
        ),
        click.option(
            "--threads",
            type=Whole(1, MAX_THREADS),
            help="Torch's threads for each stage.  [default: as profiled]",
        ),
        _setting(
            "compile",
            is_flag=True,
            help="Train each stage under torch.compile, where it can be; the summary says where "
            "not.",
        ),
        _setting(
            "deterministic",
            is_flag=True,
            help="Have torch take operations that give the same numbers every time, where it has "
            "such; on GPUs.",
        ),
        click.option(
            "--inline",
            is_flag=True,
            help="All stages in this process, with the same weight versions.",
        ),
        click.option(
            "--timeout",
            "timeout_s",
            type=Number(0, MAX_FACTOR, above=True),
            help="Longest wait for a message, in seconds.  [default: 25, or 100 periods; with "
            "--compile 600]",
        ),
    ),
    group(
        "Records",
        click.option(
            "--run-dir",
            type=FolderName(),
            help="What it writes.  [default: runs/VARIANT-DATE-TIME]",
        ),
        _setting(
            "log",
            metavar="WHERE",
            help="Metrics of every mini-batch for other programs too: csv, tensorboard, wandb, or "
            "several with commas. They go to RUN/dashboards.",
        ),
        _setting(
            "distances",
            "--distances/--no-distances",
            help="Measure how far apart the weights of forwards and backwards are.",
        ),
        _setting(
            "log_operations",
            is_flag=True,
            help="Write every operation with its weight version and times to RUN/operations.",
        ),
        _setting(
            "record",
            metavar="WHICH",
            help="Mini-batches whose operations are kept for tp-run report: first:K, last:K, "
            "steady:K (once the pipeline is full), all or none.",
        ),
    ),
    group(
        "Checkpoints and restarts",
        _setting(
            "checkpoint_every",
            type=Whole(0),
            help="Mini-batches between two checkpoints; the pipeline drains there. 0: none.  "
            "[default: at the end of each epoch]",
        ),
        _setting("keep_checkpoints", type=Whole(), help="How many of them are kept, the newest."),
        click.option(
            "--resume",
            is_flag=True,
            help="Go on with the run in --run-dir from its newest checkpoint. --epochs or --steps "
            "may grow.",
        ),
        click.option(
            "--resume-at",
            type=Whole(),
            help="The same from another checkpoint, by the mini-batches done.",
        ),
        click.option(
            "--max-restarts",
            type=Whole(0),
            default=0,
            help="After a failure start again from the newest checkpoint, so many times at most.",
        ),
    ),
    group(
        "Instead of training",
        click.option(
            "--check",
            "checks",
            is_flag=True,
            help="Train --steps mini-batches (3 by default) once more without a pipeline, and say "
            "where loss, gradients and weights differ most. Keeps nothing without --run-dir.",
        ),
        click.option(
            "--dry-run",
            is_flag=True,
            help="Check all that the run needs, send a micro-batch's shapes over every cut, and "
            "stop.",
        ),
    ),
)
"""All of tp-run. Those of how it trains are read by `settings_of`."""


def optimizer_choice(asked: dict[str, Any]) -> OptimizerChoice | None:
    """The optimizer that is named, with its own options; takes them out of `asked`.

    Raises UserError.
    """
    name, asked["betas"] = asked.pop("optimizer"), _betas(asked["betas"])
    names = ("lr", "momentum", "weight_decay", "nesterov", "betas")
    given = {option: value for option in names if (value := asked.pop(option)) is not None}
    if name is None:
        if given:
            extra = ", ".join(f"--{option.replace('_', '-')}" for option in given)
            raise UserError(f"{extra}: name the --optimizer too")
        return None
    if "lr" not in given:
        raise UserError(f"--optimizer {name}: give its --lr too")
    return OptimizerChoice(name=name, **given)


def _betas(text: str | None) -> tuple[float, float] | None:
    """``"0.9,0.999"`` → (0.9, 0.999). Raises UserError."""
    if text is None:
        return None
    try:
        first, second = (float(part) for part in text.split(","))
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ValueError
    except ValueError:
        raise UserError(f"--betas {text!r}: give two numbers from 0 to 1, like 0.9,0.999") from None
    return first, second
