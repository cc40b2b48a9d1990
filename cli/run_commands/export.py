"""tp-run export: a run's whole model as one file; and tp-run's dispatch to such commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ...profiles.errors import UserError
from ...profiles.files import EXPORT_FORMATS
from ...profiles.units import parse_bytes
from ..errors import errors_as_lines, printable
from ..options import plugin_option, quiet_option, version_option
from ..options.command import command, command_of, commands_of
from ..options.values import FileName, FolderName, Whole, WordOrPlugin
from .rank import OneRankCommand
from .report import report


@command(
    "tp-run export runs/first -o model.safetensors",
    "tp-run export runs/first --at 200 -o early.safetensors",
    "tp-run export runs/first --to hf --shard-size 1GiB -o model",
)
@click.argument("run_dir", type=FolderName(), metavar="RUN")
@click.option(
    "-o",
    "--output",
    type=FileName(),
    required=True,
    help="The safetensors file to write; with hf, dcp or --shard-size a new folder.",
)
@click.option(
    "--to",
    type=WordOrPlugin(EXPORT_FORMATS, "formats"),
    default="safetensors",
    help="hf: what from_pretrained loads, of a Hugging Face model; dcp: what "
    "torch.distributed.checkpoint loads.",
)
@click.option(
    "--shard-size",
    metavar="BYTES",
    help="Of each file at most, like 1GiB, with an index; dcp: about.  "
    "[default: one file; hf: 5GB]",
)
@click.option(
    "--at", type=Whole(), help="Mini-batches done at the checkpoint to take.  [default: the newest]"
)
@plugin_option
@quiet_option
@version_option
@errors_as_lines
def export(
    run_dir: str, output: str, to: str, shard_size: str | None, at: int | None, quiet: bool
) -> None:
    """Write the whole model of RUN, under its own names.

    Its newest checkpoint counts; without any, its final weights. RUN may be a checkpoint too.
    """
    most = None if shard_size is None else parse_bytes(shard_size, "--shard-size")
    if most == 0:
        raise UserError("--shard-size: must be a byte at least")
    from ...runtime.checkpoint.export import export as export_run

    source, tied, files = export_run(run_dir, output, to=to, at=at, shard_bytes=most)
    if not quiet:
        many = f", {files} files with weights" if files > 1 else ""
        click.echo(printable(f"wrote {output}, from {source}{many}"))
        # Hugging Face's models tie their parameters themselves.
        again = ": load_model puts it back" if most is None and to == "safetensors" else ""
        for name, first in tied.items():
            click.echo(printable(f"{name} is {first}, and written once{again}"))


class PlanOrCommand(FileName):
    """The first word after `tp-run`: a plan, or the name of another command."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Files, and the other commands, each with what it does."""
        others = [
            CompletionItem(name, help=command.get_short_help_str())
            for name in WithOthers.list_commands(ctx)
            if name.startswith(incomplete) and (command := WithOthers.get_command(ctx, name))
        ]
        return super().shell_complete(ctx, param, incomplete) + others


class WithOthers(OneRankCommand):
    """A command that runs another one where its first argument is that one's name: one of its own,
    or of a plugin ("run.NAME" for tp-run)."""

    others: Mapping[str, click.Command] = {"export": export, "report": report}

    @classmethod
    def list_commands(cls, ctx: click.Context) -> list[str]:
        return [*cls.others, *errors_as_lines(commands_of)("run")]

    @classmethod
    def get_command(cls, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return cls.others.get(cmd_name) or errors_as_lines(command_of)("run", cmd_name)

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> click.Context:
        """The context of whichever command it is."""
        # Plans are files; what a plugin has is asked for where there is none of that name.
        named = args and (args[0] in self.others or not Path(args[0]).suffix)
        other = self.get_command(click.Context(self), args[0]) if named else None
        if other is not None:
            return other.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the context is of."""
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)
