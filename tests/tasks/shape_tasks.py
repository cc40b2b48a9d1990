"""Tasks whose mini-batches differ in shape."""

from __future__ import annotations

from typing import ClassVar

import torch
from mlp_task import MLPTask
from timeprest.runtime.prepare.samples import Samples
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

LENGTHS = (2, 3, 5)
SAMPLES, MINI_BATCH = 42, 8


class Sequences(Dataset):
    """Rows of the small network's samples, 2, 3 or 5 in one."""

    def __init__(self, x, y, lengths=LENGTHS):
        self.x, self.y, self.lengths = x, y, lengths

    def __len__(self):
        return SAMPLES

    def __getitem__(self, k):
        # Long ones come rarely, so that mini-batches differ.
        length = self.lengths[(k % 7 == 0) + (k % 21 == 0)]
        return self.x[5 * k :][:length], self.y[5 * k :][:length]


def padded(samples):
    """Filled up to the longest of the mini-batch."""
    x, y = zip(*samples, strict=True)
    return pad_sequence(x, batch_first=True), pad_sequence(y, batch_first=True)


class Varying(MLPTask):
    """The small network on every row of sequences, which a loader pads to the longest of their
    mini-batch."""

    sizes: ClassVar = {"train": 600, "test": 232}

    def data(self, split):
        x, y = super().data(split).tensors
        return DataLoader(
            Sequences(x, y),
            batch_size=MINI_BATCH,
            shuffle=split == "train",
            drop_last=split == "train",
            collate_fn=padded,
        )

    def epochs(self, mini_batch, n):
        """For the oracle: all rows of each micro-batch, over and over again."""
        samples = Samples(self, "train", mini_batch // n, 0, mini_batch=mini_batch)
        each = mini_batch // n
        epoch = 0
        while True:
            yield [
                [
                    tuple(part.flatten(0, 1).numpy() for part in (inputs[0], target))
                    for inputs, target in (
                        samples.take(epoch, range(start + i * each, start + (i + 1) * each))
                        for i in range(n)
                    )
                ]
                for start in range(0, SAMPLES - mini_batch + 1, mini_batch)
            ]
            epoch += 1


class Grown(Varying):
    """Some sequences are longer than any before."""

    def data(self, split):
        found = super().data(split)
        found.dataset.lengths = (2, 3, 9)
        return found


class Bucket:
    """Mini-batches of samples of one length, none of them padded, in some sequence."""

    def __init__(self, lengths, drawn):
        self.buckets = {}
        for k, length in enumerate(lengths):
            self.buckets.setdefault(length, []).append(k)
        self.drawn = drawn

    def __len__(self):
        return sum(len(bucket) // MINI_BATCH for bucket in self.buckets.values())

    def __iter__(self):
        found = [
            bucket[k : k + MINI_BATCH]
            for bucket in self.buckets.values()
            for k in range(0, len(bucket) - MINI_BATCH + 1, MINI_BATCH)
        ]
        order = torch.randperm(len(found)) if self.drawn else range(len(found))
        return (found[k] for k in order)


class Pooled(nn.Module):
    """``[m, n, 5]`` → ``[m, 3]``, with a number that goes from layer to layer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 3)

    def forward(self, x, mask):
        h = torch.tanh(self.a(x)) * mask.unsqueeze(-1)
        steps = h.size(1)
        h = self.norm(h.reshape(-1, 6))
        h = self.b(h) / steps
        return self.c(h.view(-1, steps, 6).sum(1))


class Steps(nn.Module):
    """A layer step by step, in Python."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 3)

    def forward(self, x):
        return torch.stack([self.a(x[:, k]) for k in range(int(x.shape[1]))], 1)


class Whole(Dataset):
    """Sequences of their own lengths, with masks."""

    def __init__(self, count=48):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, 7, 5, generator=generator, dtype=torch.float64)
        self.lengths = [(7, 4, 2)[k % 3] for k in range(count)]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, k):
        x = self.x[k, : self.lengths[k]]
        return {"x": x, "mask": (x[:, 0] > -1).double()}, x.sum(0)[:3].tanh()


class Unpadded(MLPTask):
    """Mini-batches of one length each, of several inputs."""

    def model(self):
        return Pooled().double()

    def data(self, split):
        samples = Whole()
        return DataLoader(samples, batch_sampler=Bucket(samples.lengths, drawn=split == "train"))


class Collated(Whole):
    """A data set that puts its mini-batches together itself."""

    def collate_fn(self, samples):
        inputs, targets = zip(*samples, strict=True)
        return (
            {
                name: pad_sequence([sample[name] for sample in inputs], batch_first=True)
                for name in ("x", "mask")
            },
            torch.stack(targets),
        )


class CollatedTask(Unpadded):
    """The same, without a loader."""

    def data(self, split):
        found = Collated()
        found.lengths = [7 if k == 3 else 2 + k % 3 for k in range(len(found))]
        return found


class Fixed(Varying):
    """A model whose graph would be of one length alone."""

    def model(self):
        return Steps().double()


class Mixed(nn.Module):
    """Two layers, each on the rows that a mask gives it: how many those are hangs on values."""

    def __init__(self):
        super().__init__()
        self.b = nn.Linear(7, 7)
        self.c = nn.Linear(7, 7)

    def forward(self, x):
        mask, y = x.sum(-1) > 0, torch.zeros_like(x)
        y[mask], y[~mask] = self.b(x[mask]), self.c(x[~mask])
        return y


class ByMask(MLPTask):
    """The small network with such a module in it."""

    def model(self):
        net = MLPTask.model(self)
        net.t0 = Mixed().double()
        return net


class VaryingByMask(Varying):
    """The same on sequences."""

    def model(self):
        return ByMask.model(self)
