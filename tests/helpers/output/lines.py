"""Lines of the commands on stderr."""

from __future__ import annotations

import re

_PROGRESS = re.compile(r"[^:]+: [\w-]+: .* \(\d+ s[^()]*\)")


def is_progress(line: str) -> bool:
    """Whether a line says what a command is at, which it does where that takes long."""
    return _PROGRESS.fullmatch(line) is not None


def complaints(text: str) -> list[str]:
    """What tp-run says on stderr beside its progress; a launcher's own lines are left out."""
    lines = [line for line in text.splitlines() if line.startswith("tp-run: ")]
    return [line for line in lines if not is_progress(line)]
