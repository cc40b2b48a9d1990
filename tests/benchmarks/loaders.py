"""What loading costs a pipeline of two processes, and whether plans foresee it.

    python tests/benchmarks/loaders.py [--rounds 5] [--mini-batches 60]

trains one network on the same samples three ways, turn by turn: from tensors in memory, and from a
Dataset by a DataLoader in the worker's own process and with a process of its own; and prints each
period over that of tensors in memory, as medians over the rounds. Then from a loader that takes
10 ms a sample with two processes, against the period that its plan says.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import timeprest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

BATCH, SAMPLES = 16, 512
SLOW_S = 0.01


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    return images, torch.randint(0, 10, (SAMPLES,), generator=generator)


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same samples one by one, `delay_s` seconds each."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.images, self.labels = tensors()
        self.delay_s = delay_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.delay_s:
            time.sleep(self.delay_s)
        return self.images[index], self.labels[index]


class InMemory:
    """A network of equal convolutions."""

    width = 48

    def model(self) -> nn.Module:
        wide = self.width
        body = [part for _ in range(5) for part in (nn.Conv2d(wide, wide, 3, padding=1), nn.ReLU())]
        head = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * wide, 10)]
        return nn.Sequential(nn.Conv2d(3, wide, 3, padding=1), nn.ReLU(), *body, *head)

    def data(self, split: str) -> Any:
        return TensorDataset(*tensors())

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)


class Loaded(InMemory):
    """By the worker's own process."""

    def data(self, split: str) -> Any:
        return DataLoader(Samples(), batch_size=BATCH)


class LoadedBeside(InMemory):
    """By a process of its own."""

    def data(self, split: str) -> Any:
        return DataLoader(Samples(), batch_size=BATCH, num_workers=1)


class LoadedSlowly(InMemory):
    """By two processes that take 10 ms for each sample."""

    def data(self, split: str) -> Any:
        return DataLoader(Samples(SLOW_S), batch_size=BATCH, num_workers=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mini-batches", type=int, default=60)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="timeprest-loaders-"))
    try:
        race(folder, asked.rounds, asked.mini_batches)
    finally:
        shutil.rmtree(folder)


def race(folder: Path, rounds: int, mini_batches: int) -> None:
    tasks = (InMemory, Loaded, LoadedBeside, LoadedSlowly)
    profile = timeprest.profile(InMemory, batch_size=BATCH, micro_batch_sizes=[8, 16], seconds=5)
    plan = timeprest.plan(profile, devices=2, stages=2, micro_batches=2, replicas=False)
    slowly = timeprest.profile(LoadedSlowly, batch_size=BATCH, micro_batch_sizes=[8, 16], seconds=5)
    slow_plan = timeprest.plan(slowly, devices=2, stages=2, micro_batches=2, replicas=False)
    found: dict[type, list[float]] = {task: [] for task in tasks}
    for at in range(rounds):
        for task in tasks:
            run = timeprest.run(
                slow_plan if task is LoadedSlowly else plan,
                folder / f"{task.__name__}{at}",
                task=task,
                steps=mini_batches,
                evaluate=False,
            )
            summary = run.summary
            assert summary is not None
            assert summary.measured_period_s is not None
            found[task].append(summary.measured_period_s)
    base = found[InMemory]
    print(f"tensors in memory: {median(base) * 1e3:.1f} ms for a mini-batch of {BATCH}")
    for task, name in ((Loaded, "DataLoader"), (LoadedBeside, "DataLoader, num_workers=1")):
        ratios = [one / other for one, other in zip(base, found[task], strict=True)]
        shown = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
        print(f"{name}: {median(ratios):.3f} of that speed (rounds: {shown})")
    measured, planned = median(found[LoadedSlowly]), slow_plan.predicted.period_s
    print(
        f"10 ms a sample, num_workers=2: {measured * 1e3:.1f} ms, {measured / planned:.3f} of what "
        f"the plan says ({planned * 1e3:.1f} ms)"
    )


if __name__ == "__main__":
    main()
