"""A recording as columns of numbers, packed: tens of thousands of operations stay small."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import numpy as np

from ....planner.recording import MEMORY_KINDS, Recording

KINDS = "FBWU"
_TICKS = 2**32 - 2
"""Times are whole numbers of ticks, of which the whole recording has so many."""


def columns(recording: Recording) -> dict[str, Any]:
    """What `TP.Recording` decodes.

    A column is ``"u4:…"``: the type, then its numbers in base64, the lowest byte first. Indices
    that may be missing are -1 there. Memory points refer to the table of distinct states.
    """
    end_s = recording.end_s
    tick_s = end_s / _TICKS if end_s > 0 else 1.0

    def ticks(seconds: Iterable[float]) -> str:
        return packed("u4", (min(max(round(s / tick_s), 0), _TICKS) for s in seconds))

    spans, messages = recording.spans, recording.messages
    tensors: dict[str, int] = {}
    states: dict[tuple[int, ...], int] = {}
    tensor = [tensors.setdefault(m.tensor, len(tensors)) for m in messages]
    state = [states.setdefault(p.nbytes, len(states)) for p in recording.memory]
    return {
        "source": recording.source,
        "variant": recording.variant,
        "period_s": recording.period_s,
        "end_s": end_s,
        "tick_s": tick_s,
        "lanes": {
            "name": [lane.name for lane in recording.lanes],
            "stage": [lane.stage for lane in recording.lanes],
            "replica": [lane.replica for lane in recording.lanes],
        },
        "spans": {
            "count": len(spans),
            "lane": packed("u4", (s.lane for s in spans)),
            "kind": packed("u1", (KINDS.index(s.kind) for s in spans)),
            "mini": packed("i4", (s.mini_batch for s in spans)),
            "micro": packed("i4", (_index(s.micro_batch) for s in spans)),
            "start": ticks(s.start_s for s in spans),
            "end": ticks(s.end_s for s in spans),
            "version": packed("i4", (_index(s.version) for s in spans)),
            "forward_version": packed("i4", (_index(s.forward_version) for s in spans)),
        },
        "tensors": list(tensors),
        "messages": {
            "count": len(messages),
            "source": packed("u4", (m.source for m in messages)),
            "target": packed("u4", (m.target for m in messages)),
            "tensor": packed("u4", tensor),
            "mini": packed("i4", (m.mini_batch for m in messages)),
            "micro": packed("i4", (_index(m.micro_batch) for m in messages)),
            "backward": packed("u1", (int(m.backward) for m in messages)),
            "nbytes": packed("f8", (m.nbytes for m in messages)),
            "sent": ticks(m.sent_s for m in messages),
            "start": ticks(m.start_s for m in messages),
            "end": ticks(m.end_s for m in messages),
        },
        "memory_kinds": list(MEMORY_KINDS),
        "states": packed("f8", (number for found in states for number in found)),
        "memory": {
            "count": len(state),
            "lane": packed("u4", (p.lane for p in recording.memory)),
            "at": ticks(p.at_s for p in recording.memory),
            "state": packed("u4", state),
        },
    }


def _index(number: int | None) -> int:
    return -1 if number is None else number


def packed(kind: str, numbers: Iterable[float]) -> str:
    """A column. kind: "u1", "u4", "i4" or "f8"."""
    array = np.fromiter(numbers, dtype=f"<{kind}")
    return f"{kind}:{base64.b64encode(array.tobytes()).decode('ascii')}"
