"""Processor time that a worker takes for a mini-batch, by part: forward, backward, update, and what
it does besides, in Python.

    python -m timeprest.tests.benchmarks.speed.worker_time MODEL [MICRO_BATCHES [OTHER]]

MODEL is digits, or a model of the races. OTHER is a folder with another checkout, called timeprest:
runs alternate, and each figure stands beside its ratio. Processor time, since wall time means
nothing where others compute; they take caches all the same, so ratios alone are to be believed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from timeprest.profiles.zoo.digits import Digits
from timeprest.runtime.stage.compiled import StageForward
from timeprest.runtime.stage.optimizer import StageUpdates
from timeprest.runtime.stage.piece import StagePiece
from timeprest.runtime.stage.stage import Stage
from timeprest.runtime.training.operation_loop import OperationLoop
from timeprest.tests.benchmarks.shared import command, markdown
from timeprest.tests.benchmarks.speed.tasks import RACES

ROUNDS, SEGMENTS, MINI_BATCHES = 2, 4, 16
OUT = "TIMEPREST_WORKER_TIMES"
"""Where workers write, one line for each segment."""

PARTS = {
    "forward": ((StageForward, "__call__"), (StagePiece, "_loss")),
    "backward": ((Stage, "_run_backward"),),
    "update": ((StageUpdates, "step"),),
}
TOTAL, BETWEEN = "all", "between"


def count(seconds: dict[str, float]) -> None:
    """Have the functions of each part, and the training of a segment, add up what they take."""

    def timed(owner: Any, name: str, part: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **more: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*arguments, **more)
            finally:
                seconds[part] = seconds.get(part, 0.0) + time.process_time() - begin

        setattr(owner, name, call)

    for part, functions in PARTS.items():
        for owner, name in functions:
            timed(owner, name, part)
    timed(OperationLoop, "train", TOTAL)
    train = OperationLoop.train

    def written(loop: OperationLoop, segment: Any, sums: Any) -> None:
        seconds.clear()
        train(loop, segment, sums)
        with Path(f"{os.environ[OUT]}.{loop.runners[0].replica.rank}").open("a") as file:
            each = {part: took / segment.mini_batches for part, took in seconds.items()}
            print(json.dumps(each), file=file)

    OperationLoop.train = written  # type: ignore[method-assign,assignment]


TASKS: Mapping[str, Any] = {"digits": Digits(), **RACES}
if OUT in os.environ:
    count({})
globals().update({name.upper(): task for name, task in TASKS.items()})


def figures(lines: Iterable[str]) -> dict[str, float]:
    """Milliseconds of a mini-batch by part: medians over segments."""
    found = [json.loads(line) for line in lines]
    medians = {part: 1e3 * median(each.get(part, 0.0) for each in found) for part in PARTS}
    whole = 1e3 * median(each[TOTAL] for each in found)
    return {**medians, BETWEEN: whole - sum(medians.values()), TOTAL: whole}


def table(ours: Sequence[dict[str, float]], other: Sequence[dict[str, float]]) -> str:
    """A row for each worker's part. `other`: nothing where there is no other checkout."""
    rows = []
    for worker, mine in enumerate(ours):
        for part, took in mine.items():
            more = [f"{other[worker][part] / took:.2f}"] if other else []
            rows.append([str(worker), part, f"{took:.2f}", f"{took / mine[TOTAL]:.0%}", *more])
    head = ["worker", "part", "ms", "of all", *(["other / this"] if other else [])]
    return markdown(head, rows)


def main(model: str, micro_batches: str = "4", other: str = "") -> None:
    """Measure, and print the table."""
    here = str(Path(__file__).resolve())
    ours = os.environ.get("PYTHONPATH", "")
    with tempfile.TemporaryDirectory() as folder:
        profile, plan, size = f"{folder}/profile.json", f"{folder}/plan.json", "64"
        if model in RACES:
            size = str(RACES[model].mini_batch)
        target = f"{here}:{model.upper()}"
        command("profile", target, "--batch-size", size, "--seconds", "0.2", "-q", "-o", profile)
        how = ["--stages", "2", "--replicas", "off", "--micro-batches", micro_batches]
        command("plan", "solve", profile, *how, "-q", "-o", plan)
        steps = ["--steps", SEGMENTS * MINI_BATCHES, "--checkpoint-every", MINI_BATCHES]
        for k in range(ROUNDS):
            for which in ("ours", "other") if other else ("ours",):
                os.environ["PYTHONPATH"] = other if which == "other" else ours
                os.environ[OUT] = f"{folder}/{which}"
                run = ["--run-dir", f"{folder}/{which}{k}", "--no-evaluate", "-q"]
                command("run", plan, "--task", target, *steps, *run)
                del os.environ[OUT]
        os.environ["PYTHONPATH"] = ours

        def read(which: str) -> list[dict[str, float]]:
            files = (Path(f"{folder}/{which}.{rank}") for rank in range(2))
            # A run's first segment warms up.
            return [
                figures(line for k, line in enumerate(file.open()) if k % SEGMENTS)
                for file in files
            ]

        print(table(read("ours"), read("other") if other else []))


if __name__ == "__main__":
    main(*sys.argv[1:])
