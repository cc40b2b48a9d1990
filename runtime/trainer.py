"""`Trainer`: training by a plan as an object, with callbacks, and restarted after failures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..planner.plan import Plan, check_plan
from ..profiles.errors import RunError, StoppedError, UserError
from ..profiles.measuring.process_settings import settings_put_back
from ..profiles.tasks.objects import SESSION, check_not_importing, give, name_of
from ..profiles.units import path, truth, whole
from .processes.environment import launched_by
from .processes.rendezvous import Rendezvous
from .records.callbacks import Callback, Callbacks
from .records.events import RestartDue, RunEnded
from .records.metric_logs import MetricLogs
from .records.metrics import RunSummary
from .records.run_dir import RunDir
from .run import resume, run
from .settings import ADJUSTABLE, RunSettings, settings_of

T = TypeVar("T")


def with_restarts(
    first: Callable[[], T],
    resume_run: Callable[[], T],
    most: int,
    on_restart: Callable[[RestartDue], None],
) -> T:
    """Call `first`, and after a failure of the run `resume_run`, `most` times at most. Raises the
    last RunError. What the user's input is the cause of isn't tried again, nor what a signal has
    stopped."""
    attempt = first
    for restart in range(1, most + 1):
        try:
            return attempt()
        except StoppedError:
            raise
        except RunError as error:
            on_restart(RestartDue(error=error, restart=restart, of=most))
        attempt = resume_run
    return attempt()


class Trainer:
    """Trains by a plan, and calls callbacks as it goes on; what `tp-run` does.

    Attributes:
        plan, settings: what is run; None: those of the run directory, to `resume`.
        where: the run directory.
        callbacks: are told, in this sequence.
    """

    def __init__(
        self,
        plan: Plan | None,
        run_dir: str | Path,
        settings: RunSettings | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        inline: bool = False,
        max_restarts: int = 0,
        rendezvous: Rendezvous | None = None,
        task: object = None,
        **asked: Any,
    ) -> None:
        """
        Args:
            plan: consistent in itself; None, where a run is to be resumed: that run's.
            run_dir: a new directory; of a run that is to be resumed, its directory.
            task: of `asked`: its name, or an object (`profiles.tasks.objects`); of a run that is to
                be resumed whose task is in no file, that task again.
            settings: of the run; where None, they are made of `asked`: fields of
                `runtime.settings.RunSettings` such as epochs=3 or
                optimizer={"name": "adam", "lr": 1e-3}, the others as of `tp-run`.
            callbacks: see `timeprest.Callback`.
            inline: all stages in this process.
            max_restarts: after failures, from the newest checkpoint.
            rendezvous: of the workers, where torchrun or srun has started this process as one.

        Raises UserError for settings that there aren't or that can't be, and for what isn't a
        callback.
        """
        check_not_importing("timeprest.Trainer")
        launched = None if rendezvous is not None or inline else launched_by(os.environ)
        if launched is not None:
            raise UserError(
                f"this process is one of those that {launched.by} has started; start tp-run by "
                f"{launched.by}, or train from Python by itself"
            )
        if not isinstance(callbacks, Iterable):
            raise UserError(f"callbacks: give a list of them, not {type(callbacks).__name__}")
        if plan is not None and settings is None:
            named = None if task is None else name_of(task)
            settings = settings_of(plan, {**asked, "task": named})
        elif asked or (task is not None and plan is not None):
            raise UserError(
                f"{', '.join(asked) or 'task'}: leave out; the run's settings are known"
            )
        elif task is not None:
            named = RunDir(run_dir).read()[1].task
            if named.startswith(SESSION):
                give(named, task)
            elif name_of(task) != named:
                raise UserError(f"task: the run's is {named}, found by that name; leave task out")
        self.plan, self.settings = plan, settings
        # The task's code may go to another folder.
        self.where = path(run_dir, "run_dir").absolute()
        self.callbacks = tuple(callbacks)
        self._observer = Callbacks((*self.callbacks, MetricLogs()))
        self._max_restarts = whole(max_restarts, "max_restarts", 0)
        self._how: dict[str, Any] = {
            "inline": truth(inline, "inline"),
            "observer": self._observer,
            "rendezvous": rendezvous,
        }

    def run(self) -> RunSummary:
        """Train. Returns and raises as `run`; UserError without a plan."""
        if self.plan is None or self.settings is None:
            raise UserError("Trainer.run: give the plan; without one, there is resume()")
        check_plan(self.plan)
        first = partial(run, self.plan, self.settings, self.where, **self._how)
        return self._told(first, {})

    def resume(
        self,
        changes: Mapping[str, Any] | None = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        at: int | None = None,
    ) -> RunSummary:
        """Go on with the run in the run directory. Takes, returns and raises as `resume`;
        UserError for changes that a resumed run can't have."""
        changes = dict(changes or {})
        if fixed := sorted(set(changes) - set(ADJUSTABLE)):
            raise UserError(
                f"{', '.join(fixed)}: a resumed run keeps its settings, but for "
                f"{', '.join(ADJUSTABLE)}, and more epochs or steps"
            )
        given = {"epochs": epochs, "steps": steps, "at": at}
        more: dict[str, Any] = {n: whole(v, n) for n, v in given.items() if v is not None}
        first = partial(resume, self.where, changes, **more, **self._how)
        return self._told(first, changes)

    def _told(self, first: Callable[[], RunSummary], changes: Mapping[str, Any]) -> RunSummary:
        resume_run = partial(resume, self.where, changes, **self._how)
        try:
            with settings_put_back():
                summary = with_restarts(
                    first, resume_run, self._max_restarts, self._observer.restart
                )
        except BaseException as error:
            self._observer.end(RunEnded(summary=None, error=error))
            raise
        self._observer.end(RunEnded(summary=summary))
        return summary
