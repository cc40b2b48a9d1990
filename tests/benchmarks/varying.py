"""Sequences of three lengths: mini-batches of one length each, against all filled up to one.

    python tests/benchmarks/varying.py [--rounds 5] [--system timeprest]

Both train the same small GPT on the same 288 sequences, a third each of 32, 64 and 128 tokens, with
the commands: tp-profile, tp-plan solve for 2 devices, tp-run in 2 processes. Runs take turns. An
epoch's rate is in samples; the first epoch of each run isn't counted. Printed are the rates of each
round, and their ratio: the median over rounds, and the least and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from timeprest.profiles.zoo.text import Block
from timeprest.tests.benchmarks.shared import command
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

LENGTHS, SEQUENCES, MINI_BATCH = (32, 64, 128), 288, 16
WIDTH, HEADS, LAYERS, VOCABULARY = 128, 4, 4, 512
EPOCHS = 3
IGNORED = -100


class Net(nn.Module):
    """Ids ``[m, n]`` → scores ``[m, n, VOCABULARY]``."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*[Block(WIDTH, HEADS) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Padding comes last, and nothing before it sees it."""
        found: Tensor = self.head(self.norm(self.blocks(self.tokens(ids))))
        return found


class Sequences(Dataset[Any]):
    """Each id is the one before it and a step of its own; filled up, where that is asked for."""

    def __init__(self, *, padded: bool) -> None:
        self.padded = padded
        self.lengths = [LENGTHS[k % len(LENGTHS)] for k in range(SEQUENCES)]

    def __len__(self) -> int:
        return SEQUENCES

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        ids = (torch.arange(self.lengths[k] + 1) * (k % 7 + 1) + k) % VOCABULARY
        more = max(LENGTHS) - self.lengths[k] if self.padded else 0
        return functional.pad(ids[:-1], (0, more)), functional.pad(
            ids[1:], (0, more), value=IGNORED
        )


class OfOneLength:
    """Mini-batches of sequences of one length, in a sequence of their own in each epoch."""

    def __init__(self, samples: Sequences) -> None:
        alike = [[k for k, n in enumerate(samples.lengths) if n == length] for length in LENGTHS]
        self.found = [
            each[k : k + MINI_BATCH] for each in alike for k in range(0, len(each), MINI_BATCH)
        ]

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[list[int]]:
        return (self.found[k] for k in torch.randperm(len(self.found)).tolist())


class Unpadded:
    """Mini-batches of three shapes."""

    padded = False

    def model(self) -> nn.Module:
        return Net()

    def data(self, split: str) -> DataLoader[Any]:
        samples = Sequences(padded=self.padded)
        return DataLoader(samples, batch_sampler=OfOneLength(samples))

    def loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total = functional.cross_entropy(
            output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total, (target != IGNORED).sum()

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)


class Padded(Unpadded):
    """The same mini-batches, all of the longest length."""

    padded = True


def planned(name: str, system: str, folder: Path) -> Path:
    """A plan of it."""
    profile, plan = folder / f"{name}.profile.json", folder / f"{name}.plan.json"
    command("profile", f"{__file__}:{name}", "-o", profile, "--batch-size", MINI_BATCH)
    more = ("--variant", system, "--devices", 2, "--stages", 2, "--micro-batches", 4)
    command("plan", "solve", profile, "-o", plan, *more)
    return plan


def rate(plan: Path, where: Path) -> float:
    """Samples a second."""
    more = ("--run-dir", where, "--epochs", EPOCHS, "--no-evaluate", "--checkpoint-every", 0)
    command("run", plan, *more, "-q")
    lines = map(json.loads, (where / "metrics.jsonl").read_text("utf-8").splitlines())
    epochs = [line for line in lines if line["kind"] == "epoch"]
    return float(median(epoch["samples_per_s"] for epoch in epochs[1:]))


def main() -> None:
    """Run the rounds and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--system", default="timeprest")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plans = {task: planned(task, asked.system, folder) for task in ("Padded", "Unpadded")}
        for k in range(asked.rounds):
            rates = {task: rate(plan, folder / f"{task}{k}") for task, plan in plans.items()}
            ratios.append(rates["Unpadded"] / rates["Padded"])
            print(
                f"round {k + 1}: padded {rates['Padded']:.1f}, unpadded {rates['Unpadded']:.1f} "
                f"samples/s, {ratios[-1]:.2f} ×",
                flush=True,
            )
    print(f"unpadded {median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
