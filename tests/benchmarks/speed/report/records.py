"""What was measured, and the file that keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from timeprest.profiles.errors import FileError
from timeprest.profiles.files import write_bytes

from ..machine.machine import Machine, machine

FORMAT = "timeprest-races/1"
DOCS = Path(__file__).resolve().parents[4] / "docs"


class StageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One process in the steady state. Times are for a mini-batch."""

    compute_s: float
    """Of a rival: the processor's time, in all threads."""
    communication_s: float | None = None
    """In calls that send and receive, waiting left out. None: not told apart from computing."""
    idle_s: float
    peak_bytes: int | None = None
    """By the runtime's own account. None: there is none."""
    rss_bytes: int
    """Of the whole process at its peak, libraries and data included."""
    sent_bytes: float | None = None
    """In a mini-batch."""
    predicted_compute_s: float | None = None
    predicted_bytes: int | None = None
    """Of the peak, the working set inside of operations left out, which no account sees."""
    predicted_sent_bytes: int | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant's run."""

    period_s: float
    """Of a mini-batch, in the steady state."""
    samples_per_s: float
    micro_batches: int
    cuts: tuple[str, ...]
    """First layer of every stage but the first."""
    stages: tuple[StageFigures, ...]
    losses: tuple[float, ...]
    """Of the first mini-batches."""
    sent_bytes: float | None = None
    """By all processes in a mini-batch; of rivals as counted at the loopback device."""
    predicted_period_s: float | None = None
    predicted_speedup: float | None = None
    """Over one device, by the same profile."""
    foreign_share: float
    """Of the processors' time that went to others meanwhile."""
    pace: float | None = None
    """Of the machine before it and behind it, the slower, as a share of the best."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Contestants that ran one after the other; ratios are taken within it."""

    model: str
    begun: str
    runs: dict[str, Figures]
    thrown_away: int = 0
    """Runs that were repeated because of foreign load, or a slow machine."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What one system holds on every stage of one model, in bytes."""

    model: str
    variant: str
    micro_batches: int
    predicted_bytes: tuple[int, ...]
    """The peak, the working set inside of operations left out."""
    accounted_bytes: tuple[int, ...]
    predicted_weight_bytes: tuple[int, ...]
    """All versions together."""
    accounted_weight_bytes: tuple[int, ...]
    """At the peak of the whole."""
    versions: tuple[int, ...]
    differences: tuple[int, ...]
    in_flight: tuple[int, ...] = ()
    """The limits: mini-batches that may be in flight."""
    equal_limits: bool = False
    """Alike for all systems, the most that 1F1B can use; otherwise the planner's choice."""
    predicted_period_s: float | None = None


def held_of(held: Sequence[Held], model: str, *, equal_limits: bool) -> dict[str, Held]:
    """What systems hold on a model, by name."""
    mine = (each for each in held if each.model == model)
    return {each.variant: each for each in mine if each.equal_limits == equal_limits}


class LinkRun(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train over a wire between two hosts."""

    rate: str
    contestant: str
    period_s: float
    wire_bytes: float
    """In a mini-batch, in both directions, headers included."""
    micro_batches: int
    cuts: tuple[str, ...] = ()
    predicted_period_s: float | None = None


class Results(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="format",
    tag=FORMAT,
):
    """Everything that the page is made of."""

    machine: Machine
    stages: int = 2
    """Of every pipeline that was raced, each a process of one thread."""
    rounds: tuple[Round, ...] = ()
    skipped: dict[str, str] = {}
    """Contestants that can't run here, and why."""
    held: tuple[Held, ...] = ()
    links: tuple[LinkRun, ...] = ()


def read_results(path: Path, here: Machine, stages: int | None = None) -> Results:
    """What was measured before on this machine with these versions; nothing, where none was.

    Raises FileError when there are results of another one, or of another number of stages: ratios
    of both don't mix.
    """
    if not path.exists():
        return Results(machine=here, stages=stages or 2)
    found = msgspec.json.decode(path.read_bytes(), type=Results)
    if not found.machine.is_like(here):
        raise FileError(f"{path}: of another machine or other versions; --fresh begins anew")
    if stages not in (None, found.stages):
        raise FileError(
            f"{path}: of {found.stages} stages; give others their own --results, --page"
        )
    return found


def write_results(path: Path, results: Results) -> None:
    """Write it down."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(results), indent=1)
    write_bytes(path, text + b"\n")


def add_rounds(
    path: Path, rounds: Sequence[Round], skipped: dict[str, str], stages: int = 2
) -> None:
    """Add rounds to those there are, and who couldn't take part, by ``model/name``."""
    before = read_results(path, machine(), stages)
    both = (*before.rounds, *rounds)
    ran = {f"{each.model}/{name}" for each in both for name in each.runs}
    left_out = {k: why for k, why in {**before.skipped, **skipped}.items() if k not in ran}
    write_results(path, msgspec.structs.replace(before, rounds=both, skipped=left_out))
