"""Running the ranks of a rival as processes, none of them without end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from timeprest.profiles.errors import UserError

from .rank import RankFigures, RankSpec

DEEPSPEED = "deepspeed"
_SPARE_S = 15.0
"""To start and to end in, beside the time that a rank may take by its spec."""
_GRACE_S = 2.0
"""For the others to say what they have to, once one has failed."""
_POLL_S = 0.1
_STUCK = re.compile(r'^  File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)', re.MULTILINE)
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:[\w.]*\.)?\w*(?:Error|Exception)\b.*)$", re.MULTILINE)


class StuckError(UserError):
    """Ranks that came to no end in their time, and were ended."""


def run_ranks(spec: RankSpec) -> list[RankFigures]:
    """Run all ranks.

    Raises UserError with the last words of the rank that failed first, the others being ended
    then; StuckError with what ranks were at when their time was over.
    """
    with tempfile.TemporaryDirectory(prefix="races-") as folder:
        out = Path(folder) / "out"
        logs = [Path(folder) / f"log{rank}" for rank in range(spec.processes)]
        line = [sys.executable, "-m", f"{__package__}.rank", msgspec.json.encode(spec).decode()]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank, path in enumerate(logs):
                with path.open("wb") as log:
                    command = [*line, str(Path(folder) / "store"), str(out)]
                    environment = rank_environment(spec, rank)
                    started.append(
                        subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                    )
            codes = _wait(started, spec.longest_s + _SPARE_S)
        finally:
            for process in started:
                process.kill()
                process.wait()
        if codes != [0] * len(codes):
            raise _failure(spec, codes, logs)
        paths = [Path(f"{out}.{rank}") for rank in range(spec.processes)]
        return [msgspec.json.decode(path.read_bytes(), type=RankFigures) for path in paths]


def _wait(started: Sequence[subprocess.Popen[bytes]], longest_s: float) -> list[int | None]:
    """Exit codes once all have ended, or one has failed a little while ago; None: still runs."""
    until = time.monotonic() + longest_s
    while True:
        codes = [process.poll() for process in started]
        now = time.monotonic()
        if None not in codes or now > until:
            return codes
        if any(codes):
            until = min(until, now + _GRACE_S)
        time.sleep(_POLL_S)


def _failure(spec: RankSpec, codes: Sequence[int | None], logs: Sequence[Path]) -> UserError:
    what = f"{spec.kind} {spec.schedule}".strip()
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in logs]
    places = [place_of(text) for text in texts]
    if any(places):
        where = ", ".join(f"rank {r} in {place}" for r, place in enumerate(places) if place)
        return StuckError(f"{what}: stuck for {spec.longest_s:.0f} s: {where}")
    failed = [rank for rank, code in enumerate(codes) if code]
    if not failed:
        return StuckError(f"{what}: came to no end in {spec.longest_s:.0f} s")
    # The others fail because the first has gone.
    first = min(failed, key=lambda rank: logs[rank].stat().st_mtime_ns)
    code = codes[first] or 0
    if code < 0:
        return UserError(f"{what}: rank {first} was ended by signal {-code}")
    words = last_words(texts[first]) or f"rank {first} ended with exit code {code}"
    return UserError(f"{what}: {words}")


def place_of(log: str) -> str | None:
    """Where a rank was when its time was over, by what it wrote then; None: it wasn't."""
    _, timeout, stacks = log.partition("Timeout (")
    # The main thread comes last.
    _, _, stack = stacks.rpartition("(most recent call first):")
    found = _STUCK.search(stack) if timeout else None
    return f"{Path(found['path']).name}:{found['line']} ({found['name']})" if found else None


def last_words(log: str) -> str:
    """The last error in a rank's log, or its last line."""
    errors = _ERROR.findall(log)
    lines = log.strip().splitlines()
    return (errors or lines or [""])[-1].strip()


def rank_environment(spec: RankSpec, rank: int) -> dict[str, str]:
    """The environment of a rank, in which DeepSpeed is found where it was installed."""
    paths = [str(deepspeed_folder())] if spec.kind == DEEPSPEED else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(spec.processes),
        "OMP_NUM_THREADS": str(spec.threads),
    }


def deepspeed_folder() -> Path:
    """Where `make` puts DeepSpeed: beside the packages of the environment, not among them."""
    return Path(os.environ.get("DEEPSPEED_SITE") or Path(sys.prefix) / "deepspeed")
