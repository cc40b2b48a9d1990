"""GPT-3-shaped plans on paper: how long tp-plan takes for thousands of devices.

    python tests/benchmarks/planner/scale.py [--profile FILE]

Makes the profile with `tp-profile --device meta` (nothing of the model is ever allocated), plans
it for clusters of 8-device machines, each solve in a process of its own, and writes
docs/planner_scale.md, from planner_scale.head.md beside it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import InfeasibleError
from timeprest.profiles.files import read_file
from timeprest.profiles.profile import Profile, check_profile
from timeprest.profiles.units import format_bytes, format_seconds
from timeprest.tests.benchmarks.shared import command, head_of, machine

PAGE = Path(__file__).parents[3] / "docs" / "planner_scale.md"
HEAD = PAGE.with_name("planner_scale.head.md")
TARGET = "gpt2:layers=96,width=12288,heads=96,context=2048,tied=0,dropout=0"
DEVICES = (64, 512, 4096)
SYSTEMS = ("pipedream-flush", "pipedream-2bw")
MINI_BATCH = 1536
TIME_LIMIT_S = 60.0
LINKS = {
    "bandwidth": "300GB/s",
    "latency": "5us",
    "per_machine": 8,
    "between_bandwidth": "25GB/s",
    "between_latency": "20us",
}


def make_profile(path: Path) -> None:
    """Reckon the profile; about a minute."""
    how = ("--device", "meta", "--spec", "a100-80gb", "--granularity", "op", "--batch-size", 8)
    command("profile", TARGET, *how, "--micro-batch-sizes", "1,2,4,8", "-q", "-o", path)


def solve_one(path: str, system: str, devices: int) -> dict[str, Any]:
    """Plan in this process; figures of the plan and of the solve, or why there is none."""
    profile = check_profile(read_file(path, Profile), path)
    cluster = uniform_cluster(devices, "80GB", **LINKS)
    begin = time.perf_counter()
    case: dict[str, Any] = {"system": system, "layers": len(profile.layers), "devices": devices}
    try:
        plan = solve(
            profile,
            cluster,
            system,
            mini_batch=MINI_BATCH,
            optimizer_state_factor=2.0,
            replicas=True,
            recompute="auto",
            time_limit_s=TIME_LIMIT_S,
        )
    except InfeasibleError as error:
        return {**case, "none": str(error), **_spent(begin)}
    return {
        **case,
        "stages": len(plan.stages),
        "used": sum(len(stage.devices) for stage in plan.stages),
        "recomputed": sum(bool(stage.recompute) for stage in plan.stages),
        "micro_batches": plan.micro_batches,
        "period_s": plan.predicted.period_s,
        "bound_s": plan.solver.bound_s,
        "gap": plan.solver.gap,
        "tried": plan.solver.plans_tried,
        **_spent(begin),
    }


def _spent(begin: float) -> dict[str, float]:
    return {
        "seconds": time.perf_counter() - begin,
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def row(found: dict[str, Any]) -> str:
    """A line of the page's table."""
    case = found["system"], f"{found['devices']:,}"
    spent = format_seconds(found["seconds"]), format_bytes(found["memory_bytes"])
    if "none" in found:
        return "| " + " | ".join((*case, "none", *[""] * 7, *spent)) + " |"
    cells = (
        *case,
        f"{found['used']:,}",
        found["stages"],
        found["recomputed"],
        found["micro_batches"],
        format_seconds(found["period_s"]),
        format_seconds(found["bound_s"]),
        f"{found['gap']:.1%}",
        found["tried"],
        *spent,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def page(rows: list[str], found: list[dict[str, Any]]) -> str:
    """The page's text."""
    titles = ["system", "devices", "used", "stages", "recomputed", "N", "period", "bound", "gap"]
    titles += ["plans", "seconds", "memory of the solve"]
    none = [
        f"\n{case['system']} on {case['devices']:,}: {case['none']}."
        for case in found
        if "none" in case
    ]
    return HEAD.read_text(encoding="utf-8").format(
        shown=rows[0],
        rows="\n".join([*head_of(titles), *rows, *none]),
        target=TARGET,
        layers=f"{found[0]['layers']:,}",
        mini_batch=MINI_BATCH,
        seconds=f"{TIME_LIMIT_S:.0f}",
        machine=machine(),
    )


def main() -> None:
    """Solve every case, write the page."""
    parser = argparse.ArgumentParser(description="Plan a GPT-3 shape for thousands of devices.")
    parser.add_argument("--profile", help="a profile made before")
    parser.add_argument("--one", nargs=2, metavar=("SYSTEM", "DEVICES"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(solve_one(asked.profile, asked.one[0], int(asked.one[1]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = asked.profile or str(Path(folder) / "gpt3.json")
        if not asked.profile:
            make_profile(Path(path))
        found = []
        for system in SYSTEMS:
            for devices in DEVICES:
                line = [sys.executable, __file__, "--profile", path, "--one", system, str(devices)]
                done = subprocess.run(line, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr)
                found.append(json.loads(done.stdout))
                print(row(found[-1]), flush=True)
    PAGE.write_text(page(list(map(row, found)), found), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
