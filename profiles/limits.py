"""How large numbers in files and options may be: sums and products of them stay finite.

Far above what any model or cluster has, and far below where arithmetic ends.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_FILE_BYTES = 256 * 2**20
"""A file larger than this isn't read: 256 MiB."""
MAX_TOML_BYTES = 4 * 2**20
"""TOML takes a hundred times as long to read."""
MAX_LOG_BYTES = 2**31
"""A run writes logs line by line; larger ones aren't read: 2 GiB."""
MAX_BYTES = 2**50
"""Of one layer, tensor or device: 1 PiB."""
MAX_SECONDS = 1e9
"""Of one layer or message: 30 years."""
MIN_SECONDS = 1e-30
"""What is shorter and not 0 has too few digits left to reckon with."""
MAX_COUNT = 2**40
"""Of samples, mini-batches, updates."""
MAX_THREADS = 1024
"""Torch starts as many as it is told, however few cores there are."""
MAX_FACTOR = 1e9
"""Of ratios: a device's speed, an optimizer's state."""
MAX_PREDICTED = 1e60
"""Of what is computed from all of these."""

Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
BytesPerSample = Annotated[float, Meta(ge=0, le=MAX_BYTES)]
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Tally = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Threads = Annotated[int, Meta(ge=1, le=MAX_THREADS)]
Factor = Annotated[float, Meta(ge=0, le=MAX_FACTOR)]
Bandwidth = Annotated[float, Meta(ge=1, le=float(2**62))]
"""In bytes per second."""
TotalBytes = Annotated[int, Meta(ge=0)]
"""Over layers and micro-batches: more than one layer's limit. `read_file` limits the digits."""
Predicted = Annotated[float, Meta(ge=0, le=MAX_PREDICTED)]


def ratio(amount: float, per: float) -> float:
    """amount / per; 0 where that says nothing, `per` being 0 or next to it."""
    found = amount / per if per else 0.0
    return found if found <= MAX_PREDICTED else 0.0
