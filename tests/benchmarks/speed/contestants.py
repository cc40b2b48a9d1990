"""Who is raced: one process, data parallelism, other pipelines, and the systems of ours.

A name may end in @N: so many micro-batches, instead of the best number; in +K: K stages on each
device; and in =RIVAL: with that one's cuts and micro-batches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from timeprest.planner.systems.variants import VARIANTS
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
        stages_per_rank: of that, too; and of ours, where it isn't what the system has by default.
        micro_batches: fixed; None: the best are looked for.
        cut_as: of ours, the rival that it has cuts and micro-batches of; empty: its own.
        device: "cpu" or "cuda"; there all processes share the first GPU.
    """

    name: str
    title: str
    kind: Kind
    processes: int = 2
    threads: int = 1
    schedule: str = ""
    stages_per_rank: int = 1
    micro_batches: int | None = None
    cut_as: str = ""
    device: str = "cpu"

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
        return bare_name(self.name)

    @property
    def file_name(self) -> str:
        """The name as a part of a file's."""
        return file_name(self.name)

    def on(self, cores: int, device: str = "cpu") -> Contestant:
        """With a process of one thread for each core; one process has as many threads, or one."""
        here = replace(self, device=device)
        if self.processes > 1:
            return replace(here, processes=cores)
        return replace(here, threads=cores) if self.threads > 1 else here

    def least_micro_batches(self) -> int:
        """What the schedule needs."""
        return self.stages if self.schedule == "DualPipeV" else self.processes


def file_name(name: str) -> str:
    """A contestant's name as a part of a file's."""
    return name.replace("@", "-").replace("=", "-as-")


def bare_name(name: str) -> str:
    """The name without what it may end in."""
    return re.split("[@+=]", name)[0]


TDP = "torch.distributed.pipelining"

_RIVALS = (
    Contestant(BASE, "one process, 1 thread", "plain", processes=1),
    Contestant("two-threads", "one process, as many threads", "plain", processes=1, threads=2),
    Contestant("alone", "as many processes, each with a model of its own", "plain"),
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


_NAME = re.compile(
    r"([^@+=]+)(?:@([1-9][0-9]*))?(?:\+([1-9]))?(?:=(tdp-[a-z0-9]+(?:@[1-9][0-9]*)?))?"
)


def contestant_named(text: str) -> Contestant:
    """The contestant of a name, with @N, +K and =RIVAL or without. Raises UserError."""
    parts = _NAME.fullmatch(text)
    found = ALL.get(parts[1]) if parts else None
    if parts is None or found is None or ((parts[3] or parts[4]) and found.kind != "ours"):
        known = ", ".join(ALL)
        more = "NAME@N, or of ours NAME+K or NAME=RIVAL"
        raise UserError(f"contestant {text!r}: choose of {known}, or {more}")
    title = found.title
    if parts[2]:
        title += f", {parts[2]} micro-batches"
        found = replace(found, micro_batches=int(parts[2]))
    if parts[3]:
        title += f", {parts[3]} stages a device"
        found = replace(found, stages_per_rank=int(parts[3]))
    if parts[4]:
        title += f", cut as {parts[4]}"
        found = replace(found, cut_as=parts[4])
    return replace(found, name=text, title=title)
