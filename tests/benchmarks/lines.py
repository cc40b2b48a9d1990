"""Lines of Python by folder, core and satellites apart: `make lines`.

    python tests/benchmarks/lines.py [REVISION]

With a revision, such as a commit, its lines stand beside those of the working tree.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

from timeprest.tests.helpers.paths import ROOT, SATELLITES

PACKAGES = ("profiles", "planner", "runtime", "cli")


def git(*words: str) -> str:
    """What git prints."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def lines_of(revision: str | None) -> Counter[str]:
    """Lines by folder, a package's own files under its name; None: of the working tree."""
    found: Counter[str] = Counter()
    if revision is None:
        listed = git("ls-files", *PACKAGES).split()
        counts = [
            (name, (ROOT / name).read_bytes().count(b"\n"))
            for name in listed
            if name.endswith(".py") and (ROOT / name).exists()
        ]
    else:
        # Every line of the tree, counted by file.
        told = git("grep", "-c", "", revision, "--", *(f"{name}/*.py" for name in PACKAGES))
        split = [line.removeprefix(f"{revision}:").rsplit(":", 1) for line in told.splitlines()]
        counts = [(name, int(count)) for name, count in split]
    for name, count in counts:
        parts = name.split("/")
        found["/".join(parts[:2]) if len(parts) > 2 else parts[0]] += count
    return found


def main(arguments: list[str]) -> None:
    """Print the table."""
    now, apart = lines_of(None), SATELLITES
    before = lines_of(arguments[0]) if arguments else Counter[str]()

    def row(name: str, folders: set[str]) -> str:
        old = f"{sum(before[f] for f in folders):>9,}" if arguments else ""
        return f"{name:<28}{old}{sum(now[f] for f in folders):>9,}"

    every = set(now) | set(before)
    core = every - apart
    for package in PACKAGES:
        for folder in sorted(f for f in core if f.split("/")[0] == package):
            print(row(folder, {folder}))
    print(row("core", core), end="\n\n")
    for folder in sorted(apart):
        print(row(folder, {folder}))
    print(row("satellites", apart), end="\n\n")
    print(row("all", every))


if __name__ == "__main__":
    main(sys.argv[1:])
