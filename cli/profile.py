"""tp-profile: measure a model → a profile file; or the links between processes → a cluster file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click

from ..profiles.errors import UserError
from ..profiles.files import MAX_FACTOR, MAX_THREADS, Kind, check_output, write_file
from ..profiles.imported.reader import import_profile, is_foreign
from ..profiles.measuring.process_settings import (
    folder_kept,
    keep_freed_memory,
    without_collections,
)
from ..profiles.profile import FRONT_ENDS, Profile
from .errors import errors_as_lines, output, print_json
from .options import CONTEXT, common_options, config_options, plugin_option
from .options.command import examples, group, options, refuse
from .options.values import FileName, Fraction, Number, TargetName, Whole, whole_numbers
from .progress import Bar
from .run_commands.rank import OneRankCommand, one_rank_tells, rendezvous_at_hand
from .tables.profile import print_profile

_OF_MEASURING = (
    *("granularity", "front_end", "inputs", "seconds", "relative_error", "batches", "together"),
    *("spec", "threads", "autocast"),
)
_OF_MODELS = ("batch_size", "micro_batch_sizes", "edges", *_OF_MEASURING)
"""Options without effect on figures that are read, and on links."""

_options = options(
    click.argument("target", type=TargetName(), required=False),
    click.option(
        "-o",
        "--output",
        "path",
        type=FileName(),
        help="The profile to write.  [default: profile.json]",
    ),
    group(
        "Model",
        click.option(
            "--granularity",
            default="layer",
            metavar="layer|op|PATTERN",
            help="What makes a layer: a leaf module, an operation, or a module whose name "
            "matches (h.*, or several with commas).",
        ),
        click.option(
            "--front-end",
            type=click.Choice([name for name in FRONT_ENDS if name != "onnx"]),
            help="How to find the graph.  [default: the first that can]",
        ),
        click.option(
            "--input",
            "inputs",
            multiple=True,
            metavar="SHAPE:DTYPE",
            help="What a model that isn't a task takes, one sample: 3x32x32:float32, "
            "64:int64:1000 for integers below 1000, or by name mask=64:int64. Once for each "
            "input.",
        ),
    ),
    group(
        "What is measured",
        click.option(
            "--batch-size",
            type=Whole(),
            help="Samples in a mini-batch.  [default: its DataLoader's, or the largest of "
            "--micro-batch-sizes, or 64]",
        ),
        click.option(
            "--micro-batch-sizes",
            metavar="LIST",
            help="Sizes to measure, like 4,8,16.  [default: the mini-batch and its halves]",
        ),
        click.option(
            "--seconds",
            type=Number(0, MAX_FACTOR),
            default=15.0,
            help="Time to spend on timing at most; 3 to 5 rounds are made in any case.",
        ),
        click.option(
            "--relative-error",
            type=Fraction(min_open=True),
            default=0.05,
            help="Stop when every layer with 1 % of the time is known so well.",
        ),
        click.option(
            "--batches",
            type=Whole(1),
            metavar="N",
            help="Mini-batches to look at where a collate_fn or a batch_sampler may make them of "
            "different shapes: the largest is measured.  [default: 32, within 5 s]",
        ),
        click.option(
            "--together",
            type=Whole(2),
            metavar="N",
            help="Measure too what stages cost besides their layers, and how N processes slow "
            "each other down that compute at once on this machine, as stages do.",
        ),
    ),
    group(
        "Numbers instead of a model",
        click.option(
            "--edges",
            type=FileName(),
            metavar="FILE",
            help="With a table of costs as TARGET: a table (CSV) with the columns from, to and, if "
            "need be, bytes.  [default: each layer feeds the next]",
        ),
    ),
    group(
        "Device",
        click.option(
            "--device",
            type=click.Choice(["cpu", "cuda", "meta"]),
            default="cpu",
            help="meta: run nothing, reckon with --spec.",
        ),
        click.option(
            "--spec",
            type=FileName(),
            metavar="NAME|FILE",
            help="With --device meta: the device to reckon with, by its data sheet.",
        ),
        click.option(
            "--threads",
            type=Whole(1, MAX_THREADS),
            default=1,
            help="Torch's threads; each stage will run with as many.",
        ),
        click.option(
            "--autocast",
            type=click.Choice(["bf16", "bfloat16", "float16"]),
            callback=lambda context, option, dtype: "bfloat16" if dtype == "bf16" else dtype,
            help="Run forwards under torch.autocast with this dtype.",
        ),
    ),
    group(
        "Links, instead of a model",
        click.option(
            "--links",
            is_flag=True,
            help="Measure the links between local processes, or those that torchrun or srun has "
            "started, instead → cluster.toml.",
        ),
        click.option(
            "--processes",
            type=Whole(2),
            default=2,
            help="With --links: how many.",
        ),
    ),
)

_MOST_PER_PROCESSOR = 4


def _check_processes(option: str, count: int) -> None:
    """Raise UserError for more processes than this machine can run at once."""
    processors = os.cpu_count() or 1
    if count > _MOST_PER_PROCESSOR * processors:
        raise UserError(
            f"{option} {count}: too many for this machine's {processors} processors; give "
            f"{_MOST_PER_PROCESSOR * processors} at most"
        )


@click.command(
    cls=OneRankCommand,
    context_settings=CONTEXT,
    epilog=examples(
        "tp-profile digits",
        "tp-profile mine.py:Task --batch-size 64 --together 2 -o mine.json",
        "tp-profile hf:bert --device meta --spec h100-80gb --batch-size 8",
    ),
)
@_options
@config_options
@plugin_option
@common_options
@errors_as_lines
@one_rank_tells
def main(
    target: str | None,
    path: str | None,
    links: bool,
    processes: int,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Measure TARGET layer by layer and write a profile file.

    TARGET: a built-in task or model (digits, text:FILE, vgg16, resnet50:size=64, gpt2,
    hf:bert, hf:FOLDER …), file.py:NAME or pkg.module:NAME, where NAME is a task, a model, or a
    function that makes one; model.onnx; a table of costs (.csv); or a file that a plugin imports.
    """
    rendezvous = rendezvous_at_hand()
    if rendezvous is not None and not links:
        raise UserError(
            f"{rendezvous.launched.by} started {rendezvous.launched.world_size} processes: a model "
            "is measured by one; of several, only --links measures something"
        )
    if links:
        if target is not None:
            raise UserError("--links: measures links and takes no TARGET")
        refuse(_OF_MODELS, "is for a model; --links takes --processes, --device and -o")
        if rendezvous is None:
            _check_processes("--processes", processes)
        else:
            started = f"{rendezvous.launched.by} started {rendezvous.launched.world_size}"
            refuse(("processes",), f"leave it out; {started}")
        from .links import links_command

        links_command(
            path or "cluster.toml",
            processes=processes,
            device=options["device"],
            quiet=quiet,
            as_json=as_json,
            rendezvous=rendezvous,
        )
        return
    if target is None:
        raise click.UsageError("Missing argument 'TARGET'.")
    refuse(("processes",), "goes with --links")
    if options["together"] is not None and options["device"] != "cpu":
        raise UserError("--together: is for --device cpu")
    _check_processes("--together", options["together"] or 1)
    path = path or "profile.json"
    check_output(path, Kind.PROFILE)
    sizes = whole_numbers(options["micro_batch_sizes"], "--micro-batch-sizes")
    if sizes and options["batch_size"] and max(sizes) > options["batch_size"]:
        raise UserError(
            f"--micro-batch-sizes: {max(sizes)} is more than the mini-batch of "
            f"{options['batch_size']}"
        )
    if is_foreign(target):
        refuse(("device", *_OF_MEASURING), f"leave it out; {target} has its figures already")
        profile = import_profile(
            target,
            batch_size=options["batch_size"],
            micro_batch_sizes=sizes,
            edges=options["edges"],
        )
    else:
        if options["edges"]:
            raise UserError("--edges: goes with a table of costs (.csv)")
        with folder_kept():
            profile = _measure(target, sizes, options, quiet=quiet)
    write_file(path, profile)
    if as_json:
        print_json(profile)
    elif not quiet:
        console = output()
        print_profile(console, profile, verbose=verbose)
        console.print(f"wrote {path}; next: tp-plan solve {path}")


def _measure(
    target: str, sizes: Sequence[int] | None, options: dict[str, Any], *, quiet: bool
) -> Profile:
    # Torch takes its time; bad options needn't wait for it.
    with without_collections():
        from ..profiles.measuring.measure import measure
        from ..profiles.measuring.platforms import platform_of
        from ..profiles.target import parse_input, resolve
        from ..runtime.verify.trial import try_in_pieces

    # As the stages do: what is measured here is to come true there.
    keep_freed_memory()
    platform = platform_of(options["device"], options["spec"], options["autocast"])
    found = resolve(target, [parse_input(text) for text in options["inputs"]])
    with Bar(f"profiling {target}", quiet=quiet) as bar:
        profile = measure(
            found,
            batch_size=options["batch_size"],
            micro_batch_sizes=sizes,
            platform=platform,
            threads=options["threads"],
            front_end=options["front_end"],
            granularity=options["granularity"],
            seconds=options["seconds"],
            error=options["relative_error"],
            batches=options["batches"],
            progress=bar,
            trial=try_in_pieces,
        )
        if options["together"] is None:
            return profile
        from ..runtime.calibration.overhead import with_processes

        bar("processes at once", 0, 0)
        return with_processes(
            profile,
            found,
            options["inputs"],
            options["together"],
            seconds=options["seconds"] / 2,
        )


if __name__ == "__main__":
    main()
