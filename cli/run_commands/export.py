"""tp-run export: a run's whole model as one file; and tp-run's dispatch to such commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..errors import errors_as_lines, printable
from ..options import CONTEXT, quiet_option, version_option
from ..options.command import GroupedCommand, examples
from ..options.values import FileName, FolderName, Whole
from .rank import OneRankCommand
from .report import report
from .study import study


@click.command(
    cls=GroupedCommand,
    context_settings=CONTEXT,
    epilog=examples(
        "tp-run export runs/first -o model.safetensors",
        "tp-run export runs/first --at 200 -o early.safetensors",
    ),
)
@click.argument("run_dir", type=FolderName(), metavar="RUN")
@click.option(
    "-o", "--output", type=FileName(), required=True, help="The safetensors file to write."
)
@click.option(
    "--at",
    type=Whole(),
    help="Mini-batches done at the checkpoint to take.  [default: the newest]",
)
@quiet_option
@version_option
@errors_as_lines
def export(run_dir: str, output: str, at: int | None, quiet: bool) -> None:
    """Write the whole model of RUN, under its own names, to one safetensors file.

    Its newest checkpoint counts; without any, its final weights. RUN may be a checkpoint too.
    """
    from ...runtime.checkpoint.export import export as export_run

    source, tied = export_run(run_dir, output, at=at)
    if not quiet:
        click.echo(printable(f"wrote {output}, from {source}"))
        for name, first in tied.items():
            click.echo(printable(f"{name} is {first}, and written once: load_model puts it back"))


class PlanOrCommand(FileName):
    """The first word after `tp-run`: a plan, or the name of another command."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Files, and the other commands, each with what it does."""
        others = [
            CompletionItem(name, help=command.get_short_help_str())
            for name, command in WithOthers.others.items()
            if name.startswith(incomplete)
        ]
        return super().shell_complete(ctx, param, incomplete) + others


class WithOthers(OneRankCommand):
    """A command that runs another one where its first argument is that one's name."""

    others: Mapping[str, click.Command] = {
        "export": export,
        "report": report,
        "study": study,
    }

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """The context of whichever command it is."""
        other = self.others.get(args[0]) if args else None
        if other is not None:
            return other.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the context is of."""
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)
