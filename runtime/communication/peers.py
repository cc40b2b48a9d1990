"""When another worker is gone, or doesn't answer in time."""

from __future__ import annotations

from datetime import timedelta

from ...profiles.errors import RunError


class PeerError(RunError):
    """A wait on another worker failed: it is gone, or the bound was reached."""


def why_lost(error: BaseException, timeout: timedelta) -> str:
    """What a failed wait means, in a few words."""
    text = str(error)
    late = "timed out" in text.lower() or "timeout" in text
    if late or isinstance(error, TimeoutError):
        return f"nothing came for {timeout.total_seconds():g} s (--timeout)"
    if "closed" in text or "reset" in text or "Broken pipe" in text:
        return "it is gone"
    return " ".join(text.split())[:200]
