"""What plans say of a GPU's memory beside what its driver shows, and a plan that fills its limit.

    python -m timeprest.tests.benchmarks.speed.gpu_memory FOLDER [MODEL ...]

Each model is trained by a plan of one stage, and of two that share the GPU; the peak is what
nvidia-smi shows above what was there before. Then one whose limit is less than what it takes at
leisure, beside a process that leaves no more than that free.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import timeprest
from timeprest.planner.plan import Plan
from timeprest.profiles.errors import TimeprestError
from timeprest.profiles.profile import Profile

from .tasks import ALL_RACES, target_of

GIB = 1 << 30
STEPS = 16
TIGHT, FLUSHED = 0.6, "pipedream-flush"
"""What a plan that has to fit gets, of what it takes at leisure; in a system that can save some."""


def used_bytes() -> int:
    """Of the first GPU, as nvidia-smi shows it."""
    line = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(line, capture_output=True, text=True, check=True).stdout) * 2**20


class Peak:
    """Looks at the memory in the background."""

    def __init__(self) -> None:
        self.before = used_bytes()
        self.most = self.before
        self._ended = False
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._ended:
            self.most = max(self.most, used_bytes())
            time.sleep(0.02)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()

    @property
    def bytes(self) -> int:
        """More than before."""
        return self.most - self.before


def trained(plan: Plan, folder: Path) -> tuple[int, int]:
    """Train a little. Returns the peak, and what tensors had of it."""
    shutil.rmtree(folder, ignore_errors=True)
    with Peak() as peak:
        done = timeprest.run(
            plan, folder, steps=STEPS, evaluate=False, checkpoint_every=0, device="cuda"
        )
    assert done.summary is not None
    return peak.bytes, sum(int(stage.device_peak_bytes or 0) for stage in done.summary.stages)


def compare(model: str, folder: Path) -> None:
    """Print a line for each number of stages."""
    size = ALL_RACES[model].mini_batch
    profile = timeprest.profile(target_of(model), batch_size=size, seconds=3, device="cuda")
    for stages in (1, 2):
        plan = timeprest.plan(
            profile, devices=stages, stages=stages, variant="timeprest", replicas=False
        )
        seen, of_tensors = trained(plan, folder / f"{model}-{stages}")
        planned = sum(stage.memory_bytes for stage in plan.predicted.stages)
        accounted = sum(stage.accounted_memory.total for stage in plan.predicted.stages)
        besides = (profile.reserved_bytes or 0, profile.reserved_share or 0.0)
        print(
            f"{model}, {stages} stage(s): planned {planned / GIB:.2f} GiB ({accounted / GIB:.2f} "
            f"in a run's account), seen {seen / GIB:.2f} GiB ({of_tensors / GIB:.2f} of tensors): "
            f"planned {planned / seen:.3f} of it; besides {besides[0] / GIB:.2f} GiB and "
            f"{besides[1]:.3f}",
            flush=True,
        )
    fill(model, profile, folder)


def fill(model: str, profile: Profile, folder: Path) -> None:
    """Train by a plan that fills what is free."""
    whole = timeprest.plan(profile, devices=1, variant=FLUSHED, micro_batches=1, replicas=False)
    limit = round(TIGHT * whole.predicted.stages[0].memory_bytes)
    plan = timeprest.plan(
        profile, devices=1, variant=FLUSHED, replicas=False, memory=limit, recompute="auto"
    )
    planned = plan.predicted.stages[0].memory_bytes
    blocker = subprocess.Popen(
        [sys.executable, "-c", _BLOCK, str(limit)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert blocker.stdout is not None
        free = int(blocker.stdout.readline())
        try:
            seen, _ = trained(plan, folder / f"{model}-tight")
            how = f"trains, and takes {seen / limit:.3f} of it"
        except TimeprestError as error:
            how = f"fails: {str(error)[:200]}"
    finally:
        blocker.kill()
        blocker.wait()
    print(
        f"{model}, filled: limit {limit / GIB:.2f} GiB, planned {planned / limit:.3f} of it, "
        f"{free / GIB:.2f} GiB free: {how}",
        flush=True,
    )


_BLOCK = """
import sys, time, torch
limit = int(sys.argv[1])
torch.zeros(1, device="cuda")
free, _ = torch.cuda.mem_get_info()
kept = torch.empty(free - limit, dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0], flush=True)
time.sleep(600)
"""


if __name__ == "__main__":
    for name in sys.argv[2:] or ["gpt_wide", "resnet50"]:
        compare(name, Path(sys.argv[1]))
