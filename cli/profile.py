"""tp-profile: measure a model → a profile file; or the links between processes → a cluster file."""

from __future__ import annotations

import os
import shlex
from typing import Any

import click

from ..profiles.errors import UserError
from ..profiles.files import Kind, check_output, write_file
from ..profiles.imported.reader import import_profile, is_foreign
from ..profiles.measuring.process_settings import (
    folder_kept,
    keep_freed_memory,
    without_collections,
)
from ..profiles.measuring.request import OF_FILES, ProfileRequest
from ..profiles.options import flags_of, option_fields
from .errors import errors_as_lines, output, print_json
from .options import ImportingCommand, common_options, config_options, options_of, plugin_option
from .options.command import command, group, options, refuse
from .options.values import FileName, TargetName, Whole
from .progress import Bar
from .run_commands.rank import OneRankCommand, one_rank_reports, rendezvous_at_hand
from .tables.profile import print_profile

_OF_MODELS = set(option_fields(ProfileRequest)) - {"device"}
_OF_MEASURING = _OF_MODELS - set(OF_FILES)
"""Options without effect on links, and on figures that are read."""

_options = options(
    click.argument("target", type=TargetName(), required=False),
    click.option(
        "-o",
        "--output",
        "path",
        type=FileName(),
        help="The profile to write.  [default: profile.json]",
    ),
    options_of(ProfileRequest),
    group(
        "Links, instead of a model",
        click.option(
            "--links",
            is_flag=True,
            help="Measure the links between local processes, or those that torchrun or srun has "
            "started, instead → cluster.toml.",
        ),
        click.option("--processes", type=Whole(2), default=2, help="With --links: how many."),
        click.option(
            "--machines",
            metavar="GPU:NxM",
            help="With --links and a TARGET of Sailor's bandwidths: which machines, as "
            "GH-96:4x2 (4 devices in each of 2).",
        ),
    ),
)

_MOST_PER_PROCESSOR = 4


class _Command(ImportingCommand, OneRankCommand):
    """Of one or several processes; or of a file."""


def _check_processes(option: str, count: int) -> None:
    """Raise UserError for more processes than this machine can run at once."""
    processors = os.cpu_count() or 1
    if count > _MOST_PER_PROCESSOR * processors:
        raise UserError(
            f"{option} {count}: too many for this machine's {processors} processors; give "
            f"{_MOST_PER_PROCESSOR * processors} at most"
        )


@command(
    "tp-profile digits",
    "tp-profile mine.py:Task --batch-size 64 --together 2 -o mine.json",
    "tp-profile hf:bert --device meta --spec h100-80gb --batch-size 8",
    cls=_Command,
)
@_options
@config_options
@plugin_option
@common_options
@errors_as_lines
@one_rank_reports
def main(
    target: str | None,
    path: str | None,
    links: bool,
    processes: int,
    machines: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Measure TARGET layer by layer, or read its costs, and write a profile file.

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
        if machines is not None and target is not None:
            refuse((*_OF_MODELS, "device", "processes"), "is for what is measured; leave it out")
            from .links import read_links

            read_links(target, machines, path or "cluster.toml", as_json=as_json, quiet=quiet)
            return
        if target is not None:
            raise UserError("--links: measures links and takes no TARGET but with --machines")
        if machines is not None:
            raise UserError("--machines: goes with a TARGET, a file of bandwidths")
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
    refuse(("processes", "machines"), "goes with --links")
    own = {name: options.pop(name) for name in {*options} - {*option_fields(ProfileRequest)}}
    asked = ProfileRequest(target, **options).read(flags_of(ProfileRequest))
    _check_processes("--together", asked["together"] or 1)
    path = path or "profile.json"
    check_output(path, Kind.PROFILE)
    if is_foreign(target):
        refuse(("device", *_OF_MEASURING), f"leave it out; {target} has its figures already")
        own |= {name: asked[name] for name in OF_FILES}
        profile = import_profile(target, spelled=lambda name: f"--{name.replace('_', '-')}", **own)
    else:
        refuse(own, f"goes with a file that is imported; {target} is none")
        if asked["edges"]:
            raise UserError("--edges: goes with a table of costs (.csv)")
        # Torch takes its time; bad options needn't wait for it.
        with without_collections():
            from ..runtime.profile import measured
        # As the stages do: what is measured here is to come true there.
        keep_freed_memory()
        with folder_kept(), Bar(f"profiling {target}", quiet=quiet) as bar:
            profile = measured(target, asked, bar)
    write_file(path, profile)
    if as_json:
        print_json(profile)
    elif not quiet:
        console = output()
        print_profile(console, profile, verbose=verbose)
        console.print(f"wrote {path}; next: tp-plan solve {shlex.quote(path)}")


if __name__ == "__main__":
    main()
