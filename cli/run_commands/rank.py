"""tp-run as one of the workers that torchrun or srun started: one of them prints for all."""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...profiles.errors import RunError, TimeprestError, UserError
from ...profiles.measuring.process_settings import end_with_parent
from ...runtime.processes.environment import Launched, check_world_size, launched_by
from ..errors import F, log, why_unprinted
from ..options.command import GroupedCommand

if TYPE_CHECKING:
    from ...planner.plan import Plan
    from ...runtime.processes.rendezvous import Rendezvous

_SILENT_S = 1.0
"""Before a rank that says nothing ends: the launcher ends the others when one has."""


class OneRankCommand(GroupedCommand):
    """A command whose usage errors are shown by rank 0 alone."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError:
            _let_rank_0_report(2)
            raise

    def print_config(self, ctx: click.Context) -> None:
        """As of other commands, by rank 0."""
        _let_rank_0_report(0)
        super().print_config(ctx)


def one_rank_reports(function: F) -> F:
    """Where torchrun or srun started this process: join the others before anything else.

    Of the errors of all, one is shown, by one of them.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            launched = launched_by(os.environ)
        except TimeprestError as error:
            _let_rank_0_report(error.exit_code)
            raise
        if launched is None:
            return function(*args, **kwargs)
        if launched.rank >= launched.world_size:
            count = launched.world_size
            raise UserError(f"rank {launched.rank}: there are {count} ranks, and the first is 0")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # srun looks after its tasks itself; of who else sets RANK nothing is known.
            end_with_parent(os.getppid())
        # Torch takes its time; who starts workers on this machine alone needn't wait for it.
        from ...runtime.processes.rendezvous import Rendezvous

        rendezvous = Rendezvous(launched, log)
        rendezvous.end_when_asked()
        click.get_current_context().obj = rendezvous

        def work() -> None:
            try:
                function(*args, **kwargs)
            except OSError as error:
                why = why_unprinted(error)
                if why is None:
                    raise
                raise RunError(f"rank {launched.rank}: {why}") from None

        return rendezvous.run(work)

    return wrapped  # type: ignore[return-value]


def rendezvous_at_hand() -> Rendezvous | None:
    """The rendezvous with the other workers; None where this command starts the workers itself."""
    found: Rendezvous | None = click.get_current_context().obj
    return found


def has_restarted(launched: Launched, run_dir: str | None) -> bool:
    """Whether the launcher has started all workers anew, of a run that had begun."""
    begun = run_dir is not None and (Path(run_dir) / "plan.json").exists()
    return launched.attempt > 0 and begun


def check_launched(
    launched: Launched, plan: Plan, inline: bool, checks: bool, max_restarts: int
) -> None:
    """Raise UserError for what torchrun or srun can't start as one of a plan's workers."""
    check_world_size(launched, plan.workers)
    if inline or checks:
        raise UserError(
            f"--{'inline' if inline else 'check'}: not under {launched.by}: start tp-run by itself"
        )
    if max_restarts:
        raise UserError("--max-restarts: is torchrun's own option there, or srun's --requeue")


def _let_rank_0_report(code: int) -> None:
    """Exit silently, unless this is rank 0."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if rank != "0":
        time.sleep(_SILENT_S)
        sys.exit(code)
