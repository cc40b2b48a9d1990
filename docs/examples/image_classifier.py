"""An image classifier, trained from a DataLoader.

    python docs/examples/image_classifier.py --stages 2 --epochs 3

profiles it, plans a pipeline of so many stages and trains it, a process for each stage. The
commands take it too: tp-profile docs/examples/image_classifier.py:Task

The images are scikit-learn's (pip install scikit-learn).
"""

from __future__ import annotations

import argparse

import timeprest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH = 64


class Images(Dataset):
    """Handwritten digits, made ready one by one as files from a disk would be."""

    def __init__(self, split: str) -> None:
        found = load_digits()
        rows = slice(0, 1408) if split == "train" else slice(1408, None)
        self.images, self.labels = found.images[rows], found.target[rows]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.tensor(self.images[index] / 8 - 1, dtype=torch.float32)[None]
        return nn.functional.interpolate(image[None], scale_factor=2)[0], int(self.labels[index])


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    # GroupNorm, since BatchNorm's statistics would be those of micro-batches.
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]


class Task:
    def model(self) -> nn.Module:
        return nn.Sequential(
            *convolution(1, 16),
            *convolution(16, 16),
            nn.MaxPool2d(2),
            *convolution(16, 32),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def data(self, split: str) -> DataLoader:
        images = Images(split)
        # Shuffles by the epoch, which it is told.
        sampler = DistributedSampler(images, 1, 0, shuffle=True) if split == "train" else None
        return DataLoader(images, batch_size=BATCH, sampler=sampler, num_workers=1)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target)

    def optimizer(self, parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"accuracy": (output.argmax(1) == target).double().mean()}


def main(arguments: list[str] | None = None) -> timeprest.Run:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--variant", default="timeprest")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="mini-batches in all, instead of epochs")
    parser.add_argument("--seconds", type=float, default=5.0, help="to measure the model")
    parser.add_argument("--run-dir", default="runs/image_classifier")
    asked = parser.parse_args(arguments)
    profile = timeprest.profile(
        Task, batch_size=BATCH, micro_batch_sizes=[16, 32, 64], seconds=asked.seconds
    )
    plan = timeprest.plan(
        profile,
        variant=asked.variant,
        devices=asked.stages,
        stages=asked.stages,
        replicas=False,
    )
    plan.show()
    length = {"steps": asked.steps} if asked.steps else {"epochs": asked.epochs}
    run = timeprest.run(plan, asked.run_dir, **length)
    run.show()
    return run


if __name__ == "__main__":
    main()
