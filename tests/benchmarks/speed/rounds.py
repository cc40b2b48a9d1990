"""Racing in interleaved rounds: every contestant once, then every one again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import msgspec
from timeprest.profiles.errors import UserError

from .contestants import BASE, Contestant
from .machine.pace import LEAST, Pace
from .machine.quiet import MOST, Watch, wait_for_quiet
from .racing.ours import linked, planned, profiled, race_ours
from .racing.rivals import Length, choice_path, choose, chosen, guess, race_rival, why_not
from .report.records import Figures, Round

REPEATS = 3
"""Times that a run is made again because others were computing."""
SEARCH = Length(warm=1, timed=3)
"""Of the runs in which rivals' settings are looked for."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How to race.

    Attributes:
        folder: for profiles, plans and rivals' settings, which are made once.
        rounds: at most.
        until: of time.monotonic(); no round begins after that, and no run is repeated.
        profile_s: to spend on a profile.
        search: for the rivals' best settings; otherwise balanced cuts do.
        most_foreign: share of the processors' time that a run may have lost to others.
        least_pace: share of the machine's best pace that it must have before and behind a run.
        patience_s: how long it is waited for that before a run. None: as long as `Pace` does; then
            nobody runs. Else whoever's turn it is runs all the same, and the page says so.
    """

    folder: Path
    rounds: int
    length: Length
    until: float
    profile_s: float = 15.0
    most_foreign: float = MOST
    least_pace: float = LEAST
    search: bool = True
    patience_s: float | None = None


class Racer:
    """Races contestants on one model, and remembers who can't."""

    def __init__(self, settings: Settings, tell: Tell) -> None:
        self.settings = settings
        self.tell = tell
        self.skipped: dict[str, str] = {}
        self._pace = Pace(settings.folder / "pace.json", settings.least_pace)

    def close(self) -> None:
        """End what it keeps running beside the races."""
        self._pace.close()

    def prepare(self, model: str, contestants: Sequence[Contestant]) -> list[Contestant]:
        """Profile, plan and look for settings where that hasn't been done. Returns who can race.

        What is measured here is measured without others, or again.
        """
        able = []
        for contestant in contestants:
            try:
                self._prepare(contestant, model)
            except UserError as error:
                self.skipped[f"{model}/{contestant.name}"] = str(error)
                self.tell(f"{model} {contestant.name}: left out: {error}")
            else:
                able.append(contestant)
        return able

    def _prepare(self, contestant: Contestant, model: str) -> None:
        folder = self.settings.folder
        if contestant.kind == "ours":
            processes = contestant.processes
            self._alone(folder / "cluster.toml", lambda: linked(folder, processes))
            seconds = self.settings.profile_s
            profile = folder / model / "profile.json"
            device = contestant.device
            self._alone(profile, lambda: profiled(model, folder, seconds, processes, device))
            planned(contestant, model, folder)
            return
        reason = why_not(contestant)
        if reason is not None:
            raise UserError(reason)
        path = choice_path(folder, model, contestant.file_name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._wait()
            find = choose if self.settings.search else guess
            found = find(contestant, model, self.tell, SEARCH)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(found)))

    def _wait(self) -> float:
        """Wait until nobody else computes and the machine is at its pace. Returns that."""
        wait_for_quiet(self.settings.most_foreign)
        until, patience_s = self.settings.until, self.settings.patience_s
        if patience_s is not None:
            until = min(until, time.monotonic() + patience_s)
        return self._pace.wait(self.tell, until)

    def _slow(self, pace: float | None) -> bool:
        """Whether that is too slow for a figure to be kept."""
        if pace is None or self.settings.patience_s is not None:
            return False
        return pace < self.settings.least_pace

    def _alone(self, path: Path, make: Callable[[], Path]) -> None:
        """Make a file that holds measurements, once more while the machine isn't at its best."""
        for attempt in range(REPEATS + 1):
            if path.exists():
                return
            before = self._wait()
            watch = Watch()
            make()
            share = watch.foreign_share()
            pace = min(before, self._pace.now())
            self.tell(
                f"{path.parent.name}/{path.name}: {share:.1%} of the time was others', "
                f"at {pace:.0%} of the best pace"
            )
            good = share <= self.settings.most_foreign and not self._slow(pace)
            if not good and attempt < REPEATS and time.monotonic() < self.settings.until:
                path.unlink()

    def rounds(self, model: str, contestants: Sequence[Contestant]) -> list[Round]:
        """So many rounds as are asked for and time allows; those that stayed clean."""
        found = []
        for k in range(self.settings.rounds):
            if time.monotonic() > self.settings.until:
                break
            # Nobody always runs first, or behind the same one.
            turn = k % len(contestants)
            order = [*contestants[turn:], *contestants[:turn]]
            found.append(self._round(model, order if k % 2 == 0 else order[::-1]))
        return [each for each in found if BASE in each.runs and len(each.runs) > 1]

    def _round(self, model: str, contestants: Sequence[Contestant]) -> Round:
        begun = datetime.now(timezone.utc).isoformat(timespec="seconds")
        runs: dict[str, Figures] = {}
        thrown = 0
        for contestant in contestants:
            for _ in range(REPEATS + 1):
                figures = self._run(contestant, model)
                if figures is None:
                    break
                if self._good(figures):
                    runs[contestant.name] = figures
                    break
                thrown += 1
                if time.monotonic() > self.settings.until:
                    break
        return Round(model=model, begun=begun, runs=runs, thrown_away=thrown)

    def _good(self, figures: Figures) -> bool:
        """Whether the machine was as it should be."""
        alone = figures.foreign_share <= self.settings.most_foreign
        return alone and not self._slow(figures.pace)

    def _run(self, contestant: Contestant, model: str) -> Figures | None:
        before = self._wait()
        if self._slow(before):
            self.tell(f"{model} {contestant.name}: not run: the machine stays slow")
            return None
        watch = Watch()
        length, folder = self.settings.length, self.settings.folder
        try:
            if contestant.kind == "ours":
                figures = race_ours(contestant, model, folder, length)
            else:
                choice = chosen(folder, model, contestant.file_name)
                figures = race_rival(contestant, model, choice, length)
        except UserError as error:
            self.skipped[f"{model}/{contestant.name}"] = str(error)
            self.tell(f"{model} {contestant.name}: failed: {error}")
            return None
        share = watch.foreign_share()
        pace = min(before, self._pace.now())
        figures = msgspec.structs.replace(figures, foreign_share=share, pace=pace)
        kept = "" if self._good(figures) else "  thrown away"
        self.tell(
            f"{model} {contestant.name}: {figures.period_s * 1e3:.0f} ms a mini-batch, "
            f"{figures.samples_per_s:.1f} samples/s; others had {share:.1%}, pace {pace:.0%}{kept}"
        )
        return figures
