"""Who is raced: one process, data parallelism, other pipelines, and the systems of ours.

A name may end in @N: so many micro-batches, instead of the best number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from timeprest.planner.variants import VARIANTS
from timeprest.profiles.errors import UserError

Kind = Literal["ours", "plain", "ddp", "tdp", "deepspeed"]

BASE = "one-thread"
"""The contestant that all others are held against."""


@dataclass(frozen=True)
class Contestant:
    """One way to train a model, by default on two cores.

    Attributes:
        title: for people.
        kind: whose code it is.
        processes, threads: how many, and torch's threads in each.
        schedule: of torch.distributed.pipelining, the class's name without "Schedule".
        stages_per_rank: of that, too.
        micro_batches: fixed; None: the best are looked for.
    """

    name: str
    title: str
    kind: Kind
    processes: int = 2
    threads: int = 1
    schedule: str = ""
    stages_per_rank: int = 1
    micro_batches: int | None = None

    @property
    def stages(self) -> int:
        """Pieces that the model is cut into."""
        piped = self.kind in ("tdp", "deepspeed")
        return self.processes * self.stages_per_rank if piped else 1

    @property
    def synchronous(self) -> bool:
        """Whether it trains as one process does, but for rounding."""
        return self.kind != "ours" or VARIANTS[self.variant].flushes

    @property
    def variant(self) -> str:
        """The system, where it is ours."""
        return self.name.partition("@")[0]

    def on(self, cores: int) -> Contestant:
        """With a process of one thread for each core; one process has as many threads, or one."""
        if self.kind != "plain":
            return replace(self, processes=cores)
        return replace(self, threads=cores) if self.threads > 1 else self

    def least_micro_batches(self) -> int:
        """What the schedule needs."""
        return self.stages if self.schedule == "DualPipeV" else self.processes


TDP = "torch.distributed.pipelining"

_RIVALS = (
    Contestant(BASE, "one process, 1 thread", "plain", processes=1),
    Contestant("two-threads", "one process, as many threads", "plain", processes=1, threads=2),
    Contestant("ddp", "DistributedDataParallel, as many processes", "ddp"),
    Contestant("tdp-gpipe", f"{TDP} GPipe", "tdp", schedule="GPipe"),
    Contestant("tdp-1f1b", f"{TDP} 1F1B", "tdp", schedule="1F1B"),
    Contestant("tdp-zbv", f"{TDP} ZB-V", "tdp", schedule="ZBVZeroBubble", stages_per_rank=2),
    Contestant(
        "tdp-dualpipev", f"{TDP} DualPipe-V", "tdp", schedule="DualPipeV", stages_per_rank=2
    ),
    Contestant("deepspeed", "DeepSpeed's pipeline", "deepspeed"),
)

RIVALS = {contestant.name: contestant for contestant in _RIVALS}
OURS = {name: Contestant(name, name, "ours") for name in VARIANTS}
ALL = {**RIVALS, **OURS}


def contestant_named(text: str) -> Contestant:
    """The contestant of a name, with @N or without. Raises UserError."""
    name, at, count = text.partition("@")
    if name not in ALL or (at and not (count.isdecimal() and int(count))):
        raise UserError(f"contestant {text!r}: choose of {', '.join(ALL)}, or NAME@N")
    found = ALL[name]
    if not at:
        return found
    title = f"{found.title}, {count} micro-batches"
    return replace(found, name=text, title=title, micro_batches=int(count))
