"""tp-run: train by a plan."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import msgspec

from ..planner.plan import read_plan
from ..profiles.errors import UserError
from ..profiles.files import MAX_FACTOR, MAX_SECONDS, MAX_THREADS
from ..profiles.measuring.process import keep_freed_memory
from ..runtime.processes.environment import check_world_size
from ..runtime.processes.locks import check_system
from .errors import (
    Number,
    Stopped,
    Whole,
    common_options,
    errors_as_lines,
    naming,
    output,
    print_json,
    tell,
)
from .options import betas_in, optimizer_choice
from .progress import Bar
from .run_commands.checks import device_lines, show_check, show_dry_run, warn_of_memory
from .run_commands.export import WithOthers
from .run_commands.rank import meeting_at_hand, one_rank_tells
from .run_commands.resume import check_resumable, given, how_to_go_on, place_of, read_run

if TYPE_CHECKING:
    from ..runtime.processes.rendezvous import Meeting
    from ..runtime.records.metrics import EpochRecord


_AUTOCAST: dict[str | None, Literal["profiled", "bfloat16", "off"]] = {
    None: "profiled",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "off": "off",
}


@click.command(
    cls=WithOthers,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="tp-run report RUN... shows what runs did beside what their plans predicted.  tp-run "
    "export RUN -o FILE writes a run's whole model to one safetensors file.",
)
@click.argument("plan_path", metavar="PLAN", required=False)
@click.option(
    "--task",
    help="Built-in task, file.py:NAME or pkg.module:NAME.  "
    "[default: what the plan's profile measured]",
)
@click.option("--epochs", type=Whole(), help="[default: 5]")
@click.option("--steps", type=Whole(), help="Mini-batches in all, instead of --epochs.")
@click.option(
    "--ragged",
    type=click.Choice(["drop", "pad", "error"]),
    default="drop",
    show_default=True,
    help="Samples that don't fill an epoch's last mini-batch.",
)
@click.option(
    "--optimizer",
    type=click.Choice(["sgd", "adam", "adamw"]),
    help="Instead of the task's own; needs --lr.",
)
@click.option("--lr", type=Number(0, MAX_FACTOR, min_open=True))
@click.option("--momentum", type=Number(0, 1, max_open=True))
@click.option("--nesterov", is_flag=True, help="Nesterov momentum, of sgd.")
@click.option("--betas", metavar="B1,B2", help="Of adam and adamw.  [default: 0.9,0.999]")
@click.option("--weight-decay", type=Number(0, MAX_FACTOR))
@click.option(
    "--decay-only",
    type=click.Choice(["matrices", "all"]),
    default="all",
    show_default=True,
    help="Parameters with weight decay; matrices: biases and norms have none.",
)
@click.option(
    "--lr-schedule",
    type=click.Choice(["constant", "linear", "cosine"]),
    help="Instead of the task's own scheduler; linear and cosine fall to 0 by the run's end.",
)
@click.option("--warmup", type=Whole(0), help="Updates over which the learning rate rises.")
@click.option(
    "--clip-norm",
    type=Number(0, MAX_FACTOR, min_open=True),
    help="Clip gradients of the whole model to this norm.",
)
@click.option(
    "--autocast",
    type=click.Choice(["bf16", "bfloat16", "off"]),
    help="Run forwards under torch.autocast.  [default: as profiled]",
)
@click.option(
    "--deferred-batch-norm",
    is_flag=True,
    help="Update BatchNorm's running statistics once for each mini-batch.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What the stages compute on; auto: what the plan was profiled on.",
)
@click.option(
    "--transport",
    type=click.Choice(["auto", "gloo", "shm"]),
    default="auto",
    show_default=True,
    help="How messages go on the CPU; auto: shared memory on one host, gloo between hosts.",
)
@click.option("--seed", type=click.IntRange(0, 2**40), default=0, show_default=True)
@click.option(
    "--threads",
    type=click.IntRange(1, MAX_THREADS),
    help="Torch's threads for each stage.  [default: as profiled]",
)
@click.option(
    "--inline", is_flag=True, help="All stages in this process, with the same weight versions."
)
@click.option(
    "--evaluate/--no-evaluate",
    default=True,
    show_default=True,
    help="Evaluate on the test data after each epoch.",
)
@click.option(
    "--on-nan",
    type=click.Choice(["stop", "warn", "skip"]),
    default="stop",
    show_default=True,
    help="A loss or gradients that aren't finite: end the run, count them and go on, or leave "
    "that update out too.",
)
@click.option(
    "--timeout",
    type=Number(0, MAX_FACTOR, min_open=True),
    help="Longest wait for a message, in seconds.  [default: 25, or 100 periods]",
)
@click.option(
    "--decay",
    type=click.Choice(["exponential", "inverse", "linear"]),
    default="exponential",
    show_default=True,
    help="i-timeprest: how the forward's weights fade with the version difference.",
)
@click.option(
    "--lambda",
    "decay_rate",
    type=Number(0, MAX_FACTOR),
    default=1.0,
    show_default=True,
    help="i-timeprest: how fast they fade.",
)
@click.option(
    "--distances/--no-distances",
    default=True,
    show_default=True,
    help="Measure how far apart the weights of forwards and backwards are.",
)
@click.option(
    "--log-operations",
    is_flag=True,
    help="Write every operation with its weight version and times to RUN/operations.",
)
@click.option(
    "--record",
    default="steady:8",
    show_default=True,
    metavar="WHICH",
    help="Mini-batches whose operations are kept for tp-run report: first:K, last:K, steady:K "
    "(once the pipeline is full), all or none.",
)
@click.option(
    "--check",
    "checks",
    is_flag=True,
    help="Train --steps mini-batches (3 by default) once more without a pipeline, and say where "
    "loss, gradients and weights differ most. Keeps nothing without --run-dir.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check all that the run needs, send a micro-batch's shapes over every cut, and stop.",
)
@click.option("--run-dir", help="[default: runs/VARIANT-DATE-TIME]")
@click.option(
    "--checkpoint-every",
    type=Whole(0),
    help="Mini-batches between two checkpoints; the pipeline drains there. 0: none.  "
    "[default: at the end of each epoch]",
)
@click.option(
    "--keep-checkpoints",
    type=Whole(),
    default=3,
    show_default=True,
    help="How many of them are kept, the newest.",
)
@click.option(
    "--from",
    "start_from",
    metavar="RUN",
    help="Start from the weights and optimizer state of another run's newest checkpoint, of one "
    "of its checkpoints, or from a safetensors file; its stages and system may be others.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the run in --run-dir from its newest checkpoint. --epochs or --steps "
    "may grow.",
)
@click.option(
    "--resume-at",
    type=Whole(),
    help="The same from another checkpoint, by the mini-batches done.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="After a failure start again from the newest checkpoint, so many times at most.",
)
@common_options
@errors_as_lines
@one_rank_tells
def main(
    plan_path: str | None,
    task: str | None,
    epochs: int | None,
    steps: int | None,
    ragged: Literal["drop", "pad", "error"],
    optimizer: str | None,
    lr: float | None,
    momentum: float | None,
    nesterov: bool,
    betas: str | None,
    weight_decay: float | None,
    decay_only: Literal["matrices", "all"],
    lr_schedule: Literal["constant", "linear", "cosine"] | None,
    warmup: int | None,
    clip_norm: float | None,
    autocast: str | None,
    deferred_batch_norm: bool,
    device: Literal["auto", "cpu", "cuda"],
    transport: Literal["auto", "gloo", "shm"],
    seed: int,
    threads: int | None,
    inline: bool,
    evaluate: bool,
    on_nan: Literal["stop", "warn", "skip"],
    timeout: float | None,
    decay: str,
    decay_rate: float,
    distances: bool,
    log_operations: bool,
    record: str,
    checks: bool,
    dry_run: bool,
    run_dir: str | None,
    checkpoint_every: int | None,
    keep_checkpoints: int,
    start_from: str | None,
    resume: bool,
    resume_at: int | None,
    max_restarts: int,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Train by PLAN: a process for each stage and replica, on this machine.

    Started by torchrun or srun, it is one of these processes, on one machine of many.
    """
    check_system()
    meeting = meeting_at_hand()
    resume = resume or resume_at is not None
    if not resume and meeting is not None and _restarted(meeting, run_dir):
        # The launcher repeats the command with which the run was begun.
        resume, epochs, steps = True, None, None
    elif resume:
        check_resumable(run_dir, start_from)
    elif plan_path is None:
        raise click.UsageError("Missing argument 'PLAN'.")
    if epochs is not None and steps is not None:
        raise UserError("--epochs, --steps: give one of them")
    if checks and (start_from is not None or resume):
        raise UserError("--check: trains anew; leave --from and --resume out")
    if checks and epochs is not None:
        raise UserError("--check, --epochs: a check trains --steps mini-batches")
    choice = optimizer_choice(
        optimizer,
        {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov or None,
            "betas": betas_in(betas),
        },
    )
    # Torch takes its time; bad options and plans needn't wait for it.
    if resume:
        assert run_dir is not None
        plan, settings = read_run(run_dir, plan_path)
    else:
        assert plan_path is not None
        plan = read_plan(plan_path)
        from ..runtime.settings import RunSettings

        settings = RunSettings(
            task=task or plan.profile.target,
            epochs=epochs or 5,
            steps=steps,
            optimizer=choice,
            ragged=ragged,
            decay_only=decay_only,
            lr_schedule=lr_schedule,
            warmup=warmup or 0,
            clip_norm=clip_norm,
            autocast=_AUTOCAST[autocast],
            deferred_batch_norm=deferred_batch_norm,
            device=device,
            transport=transport,
            seed=seed,
            threads=threads or plan.profile.threads,
            evaluate=evaluate,
            on_nan=on_nan,
            timeout_s=timeout or min(max(25.0, 100 * plan.predicted.period_s), MAX_SECONDS),
            decay=decay,
            decay_rate=decay_rate,
            distances=distances,
            log_operations=log_operations,
            record=record,
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            start_from=start_from,
        )
    processes = sum(len(stage.devices) for stage in plan.stages)
    if meeting is not None:
        check_world_size(meeting.launched, processes)
        if inline or checks:
            raise UserError(
                f"--{'inline' if inline else 'check'}: not under "
                f"{meeting.launched.by}: start tp-run by itself"
            )
        if max_restarts:
            raise UserError("--max-restarts: is torchrun's own option there, or srun's --requeue")
    silent = quiet or as_json
    with Bar(plan.variant, quiet=silent or meeting is not None) as bar:
        bar.doing("loading torch")
        from ..runtime.run import resume as resume_run
        from ..runtime.run import run, with_restarts
        from .run_commands.progress import TrainingProgress, stopping
        from .tables.plan import operations
        from .tables.run import epoch_line, summary_lines, summary_table
        from .tables.stages import stage_table

    if checks:
        with naming(plan_path or str(run_dir)):
            show_check(plan, settings, run_dir, inline=inline, as_json=as_json, quiet=quiet)
        return
    named = run_dir or f"runs/{plan.variant}-{time.strftime('%Y%m%d-%H%M%S')}"
    if meeting is not None:
        # Each host may name its own.
        named = run_dir or meeting.share("run directory", named)
    where = Path(named)
    if dry_run:
        if resume or checks:
            raise UserError("--dry-run: goes with neither --resume nor --check")
        with naming(plan_path or named):
            show_dry_run(plan, settings, named, meeting, as_json=as_json, quiet=quiet)
        return
    console = output()

    class Show:
        """Progress on the terminal: a bar for the epoch, a line for each that is done."""

        @stopping
        def starting(self, what: str) -> None:
            bar.doing(what)

        @stopping
        def begin(self) -> None:
            if not silent:
                how = "inline" if inline else f"{processes} processes"
                what = f"training {settings.task} with {plan.variant}, {how}, in {where}"
                bar.print(f"{what}, from {place_of(where, resume_at)}" if resume else what)
                for line in device_lines(
                    plan,
                    settings,
                    processes,
                    inline=inline,
                    one_host=meeting is None or meeting.launched.one_host,
                ):
                    bar.print(line)
                profiled = plan.profile.autocast or "off"
                if settings.autocast not in ("profiled", profiled):
                    bar.print(f"predictions are for autocast {profiled}; this is another")
                if verbose:
                    bar.print(stage_table(plan, console.width), operations(plan, 16))

        @stopping
        def mini_batch(self, epoch: int, done: int, of: int, loss: float) -> None:
            progress(epoch, done, of, loss)

        @stopping
        def epoch(self, record: EpochRecord) -> None:
            if not silent:
                bar.print(epoch_line(record))

    free = {
        "timeout_s": timeout,
        "keep_checkpoints": given("keep_checkpoints"),
        "log_operations": log_operations or None,
        "record": given("record"),
        "on_nan": given("on_nan"),
        "device": given("device"),
        "transport": given("transport"),
    }
    changes = {name: value for name, value in free.items() if value is not None}
    # What the run is going to be made with, for what is said of it.
    settings = msgspec.structs.replace(settings, **changes) if resume else settings
    if inline:
        # As the stages' own processes do.
        keep_freed_memory()
    with naming(plan_path or str(run_dir)), Bar(plan.variant, quiet=silent) as bar:
        progress = TrainingProgress(bar, plan, settings, None if inline else where)
        try:
            if meeting is not None:
                from ..runtime.training.worker import resume_member, run_member

                told = (
                    resume_member(
                        named, changes, meeting, Show(), epochs=epochs, steps=steps, at=resume_at
                    )
                    if resume
                    else run_member(plan, settings, named, meeting, Show())
                )
                if told is None:
                    return
                summary = told
            else:
                again = partial(resume_run, where, changes, inline=inline, observer=Show())
                first = (
                    partial(again, epochs=epochs, steps=steps, at=resume_at)
                    if resume
                    else partial(run, plan, settings, where, inline=inline, observer=Show())
                )
                warn_of_memory(plan, settings)
                summary = with_restarts(first, again, max_restarts, tell)
        except KeyboardInterrupt:
            raise Stopped(how_to_go_on(where)) from None
    if as_json:
        print_json(summary)
    elif not quiet:
        console.print(summary_table(plan, summary))
        for line in summary_lines(plan, summary):
            console.print(line)
        console.print(f"weights, metrics and summary are in {where}")


def _restarted(meeting: Meeting, run_dir: str | None) -> bool:
    """Whether the launcher has started all workers of a run again, that has a directory."""
    begun = run_dir is not None and (Path(run_dir) / "plan.json").exists()
    return meeting.launched.attempt > 0 and begun


if __name__ == "__main__":
    main()
