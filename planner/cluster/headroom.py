"""What plans leave free of a device's memory: how it is said, and what is usual."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from ...profiles.profile import Profile, made_of
from ...profiles.units import parse_memory, parse_share

GPU_SHARE = 0.08
"""Of a GPU where it wasn't measured: CUDA's context, loaded kernels and workspaces of libraries
take some hundred MB, and torch's allocator a few per cent of what tensors take."""


class Headroom(NamedTuple):
    """Bytes of each device, or a share of its memory; the other is 0."""

    nbytes: int = 0
    share: float = 0.0

    @property
    def fields(self) -> dict[str, float]:
        """As a device of a cluster has it."""
        return {"reserved_share": self.share} if self.share else {"reserved_bytes": self.nbytes}


def parse_headroom(text: str | float, what: str = "--headroom") -> Headroom:
    """``"8%"`` or ``0.08``, ``"4GiB"`` or a number of bytes. Raises UserError naming `what`."""
    if re.fullmatch(r"0?\.\d+|.*%", str(text).strip()):
        return Headroom(share=parse_share(text, what))
    return Headroom(nbytes=parse_memory(text, what))


def usual_headroom(profile: Profile) -> Headroom:
    """What a profile's device needs besides what a plan counts: on the CPU nothing, nor where it
    was measured, for then it is counted (`costs.memory.with_reserved`)."""
    measured = profile.reserved_bytes is not msgspec.UNSET
    if measured or profile.device == "cpu" or made_of(profile):
        return Headroom()
    return Headroom(share=GPU_SHARE)
