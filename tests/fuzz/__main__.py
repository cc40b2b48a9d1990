"""Break many files and command lines, and say which commands took it badly.

python tests/fuzz --files 2000 --lines 500      what `make fuzz` does
python tests/fuzz --case plan:1234 --keep DIR   one case again
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.cases import COMMANDS, FILES, broken_file, broken_line, fill
from fuzz.commands import complaint_about


def complaint_of(kind: str, seed: int, folder: Path) -> str | None:
    """Break a file of the kind, or a command line, by the seed; what was wrong with the end."""
    rng = Random(f"{kind}:{seed}")
    # Deep, so that "../.." stays inside.
    box = folder / "a" / "b" / "c"
    fill(box)
    if kind in COMMANDS:
        return complaint_about(box, broken_line(kind, rng))
    name, calls = broken_file(kind, rng, box)
    return complaint_about(box, calls, name)


def main() -> None:
    """Print every case that went wrong; code 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="Seed of the first of each.")
    parser.add_argument("--case", help="KIND:SEED, that one alone.")
    parser.add_argument("--keep", type=Path, help="With --case: leave its files there.")
    asked = parser.parse_args()
    cases = [(FILES[k % len(FILES)], asked.first + k) for k in range(asked.files)]
    cases += [(COMMANDS[k % len(COMMANDS)], asked.first + k) for k in range(asked.lines)]
    if asked.case:
        kind, _, seed = asked.case.partition(":")
        cases = [(kind, int(seed))]
    bad = 0
    slowest = (0.0, "none")
    begin = time.perf_counter()
    for kind, seed in cases:
        folder = asked.keep or Path(tempfile.mkdtemp(prefix="fuzz"))
        started = time.perf_counter()
        complaint = complaint_of(kind, seed, folder)
        slowest = max(slowest, (time.perf_counter() - started, f"{kind}:{seed}"))
        if not asked.keep:
            shutil.rmtree(folder)
        if complaint:
            bad += 1
            print(f"=== {kind}:{seed}: {complaint}\n", flush=True)
    seconds = time.perf_counter() - begin
    files = sum(kind in FILES for kind, _ in cases)
    print(
        f"{files} files and {len(cases) - files} command lines: {bad} taken badly; "
        f"{seconds:.0f} s, the slowest {slowest[1]} {slowest[0]:.1f} s"
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
