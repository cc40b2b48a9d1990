"""Tasks whose data change whenever they are asked for, or don't fill the last mini-batch."""

from __future__ import annotations

import copy
import os
import random
import signal
import time
from collections import Counter
from itertools import count
from typing import ClassVar

import numpy as np
import torch
from graph_task import GraphTask, Tokens
from mlp_task import MLPTask
from torch import nn
from torch.nn import functional
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

_READ = count()
"""How often samples were counted in this process."""


class _Changed(MLPTask):
    """A generator without a seed has a hand in one split."""

    split = "train"

    def data(self, split):
        x, y = super().data(split).tensors
        if split == self.split:
            x, y = self.changed(x, y, np.random.default_rng())
        return TensorDataset(x, y)


class UnseededTargets(_Changed):
    def changed(self, x, y, generator):
        return x, torch.from_numpy(generator.normal(size=tuple(y.shape)))


class UnseededInputs(_Changed):
    def changed(self, x, y, generator):
        return torch.from_numpy(generator.normal(size=tuple(x.shape))), y


class UnseededOrder(_Changed):
    """Inputs and targets belong together, and lie elsewhere each time."""

    def changed(self, x, y, generator):
        order = torch.from_numpy(generator.permutation(len(x)))
        return x[order], y[order]


class UnseededLength(_Changed):
    def changed(self, x, y, generator):
        # In one process never as many as before; in two it's a matter of luck.
        length = len(x) - 1 - (next(_READ) + os.getpid()) % 40
        return x[:length], y[:length]


class UnseededTest(UnseededTargets):
    split = "test"


class UnseededTestLength(UnseededLength):
    split = "test"


class _Drawing(Dataset):
    def __init__(self, data, targets):
        self.data, self.targets = data, targets

    def __len__(self):
        return len(self.data)

    def __getitem__(self, k):
        x, y = self.data[k]
        noise = torch.randn(())
        return x + 0.1 * noise, y + noise * self.targets


class Augmented(MLPTask):
    """Inputs are changed at random with torch's own generator, targets aren't."""

    targets = 0

    def data(self, split):
        return _Drawing(super().data(split), self.targets)


class Mixed(Augmented):
    """Targets are, too."""

    targets = 1


# Samples that don't fill the last mini-batch, with results of several forms --------------------

SAMPLES = 21


class FewSamples(MLPTask):
    """The small network on 21 samples."""

    def data(self, split):
        return Subset(super().data(split), range(SAMPLES))


class FewTokens(GraphTask):
    """The graph with skips on 22 sentences; its result is a dict."""

    def data(self, split):
        tokens = Tokens(1 if split == "train" else 2)
        tokens.tokens, tokens.masks = tokens.tokens[:22], tokens.masks[:22]
        return tokens


class Rows(nn.Module):
    """``[m, 3, 4]`` → ``[3 · m, 5]``, or with time first ``[3, m, 5]``."""

    def __init__(self, time_first):
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 5)
        self.time_first = time_first

    def forward(self, x):
        y = self.b(torch.tanh(self.a(x)))
        return y.transpose(0, 1) if self.time_first else y.reshape(-1, 5)


class FlatTask:
    """A row of the result for every step of every sample, samples first."""

    time_first = False

    def model(self):
        return Rows(self.time_first).double()

    def data(self, split):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(SAMPLES, 3, 4, generator=generator, dtype=torch.float64)
        return TensorDataset(x, torch.randint(0, 5, (SAMPLES, 3), generator=generator))

    def loss(self, output, target):
        if self.time_first:
            output, target = output.flatten(0, 1), target.transpose(0, 1)
        return functional.cross_entropy(output, target.flatten())

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(-1) == target.flatten()).double().mean()}

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class TimeFirst(FlatTask):
    """Steps come before samples: nothing tells what is real of the result."""

    time_first = True
    metrics = None


class TimeFirstLoaded(TimeFirst):
    """Batches of 8 and of what is left of 12, both of whole micro-batches of 2."""

    def data(self, split):
        return DataLoader(Subset(super().data(split), range(12)), batch_size=8)


# Batches of several forms for one small network -------------------------------------------------

KINDS, STEPS, SENTENCES = 11, 4, 40


class Net(nn.Module):
    """``words`` and ``mask`` early, ``point`` of two halves late."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(KINDS, 6)
        self.mix = nn.Linear(6, 6)
        self.wide = nn.Linear(6, 8)
        self.out = nn.Linear(8, 3)

    def compute(self, words, mask, near, far):
        x = torch.tanh(self.mix(self.embed(words) * mask)).mean(1)
        return self.out(torch.tanh(self.wide(x)) + near * 0.5 + far)


class Flat(Net):
    def forward(self, words, mask, near, far):
        return self.compute(words, mask, near, far)


class Nested(Net):
    """The second argument is a dict; one of its entries is a pair, and another isn't given."""

    def forward(self, words, extra):
        near, far = extra["point"]
        assert extra.get("unused") is None
        return self.compute(words, extra["mask"], near, far)


class Named(Net):
    """Takes the labels too, and gives its own loss, as Hugging Face's models do."""

    def forward(self, words=None, mask=None, near=None, far=None, labels=None):
        scores = self.compute(words, mask, near, far)
        return {"loss": functional.cross_entropy(scores, labels), "scores": scores}


class Sentences(Dataset):
    def __init__(self, split, form):
        generator = torch.Generator().manual_seed(1 + (split == "test"))

        def normal(*shape):
            return torch.randn(SENTENCES, *shape, generator=generator, dtype=torch.float64)

        self.words = torch.randint(0, KINDS, (SENTENCES, STEPS), generator=generator)
        self.mask, self.near, self.far = normal(STEPS, 1), normal(8), normal(8)
        self.labels = self.words.sum(1) % 3
        self.form = form

    def __len__(self):
        return SENTENCES

    def __getitem__(self, k):
        return self.form(self.words[k], self.mask[k], self.near[k], self.far[k], self.labels[k])


class TupleTask:
    """``(words, mask, near, far), label``."""

    net = Flat

    def model(self):
        return self.net().double()

    def data(self, split):
        return Sentences(split, self.form)

    @staticmethod
    def form(words, mask, near, far, label):
        return (words, mask, near, far), label

    def loss(self, output, target):
        return functional.cross_entropy(output, target)

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(-1) == target).double().mean()}

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class NestedTask(TupleTask):
    net = Nested

    @staticmethod
    def form(words, mask, near, far, label):
        return (words, {"mask": mask, "point": (near, far)}), {"label": [label, -label]}

    def loss(self, output, target):
        label, negative = target["label"]
        assert torch.equal(label, -negative)
        return functional.cross_entropy(output, label)

    def metrics(self, output, target):
        return super().metrics(output, target["label"][0])


class DictTask(TupleTask):
    """Samples are dicts; one entry is no argument of the model's, and the loss has it all."""

    net = Named

    @staticmethod
    def form(words, mask, near, far, label):
        inputs = {"words": words, "mask": mask, "near": near, "far": far, "labels": label}
        return {**inputs, "place": label + 7}

    def loss(self, output, target):
        assert torch.equal(target["place"], target["labels"] + 7)
        return output["loss"]

    def metrics(self, output, target):
        return super().metrics(output["scores"], target["labels"])


class OtherNames(DictTask):
    """None of the entries is an argument of the model's."""

    @staticmethod
    def form(words, mask, near, far, label):
        return {"ids": words, "label": label}


class TextInside(NestedTask):
    """A text is among the inputs."""

    @staticmethod
    def form(words, mask, near, far, label):
        return (words, {"mask": mask, "point": (near, far), "name": "x"}), label


# Loaders and streams -----------------------------------------------------------------------------


class Rows42(Dataset):
    """The small network's samples, one by one."""

    def __init__(self, task, split, count=42):
        self.x, self.y = (part[:count] for part in MLPTask.data(task, split).tensors)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, k):
        return self.x[k], self.y[k]


class Listed(MLPTask):
    """A data set that isn't in memory as far as anybody can tell."""

    def data(self, split):
        return Rows42(self, split)


def stacked(samples):
    """A collate function of the user's own."""
    x, y = zip(*samples, strict=True)
    return torch.stack(x), torch.stack(y)


class Loaded(MLPTask):
    """A shuffled loader of mini-batches of 8; the last 2 of 42 samples are left out."""

    workers = 0
    more: ClassVar = {}

    def data(self, split):
        return DataLoader(
            self.samples(split),
            batch_size=8,
            shuffle=split == "train",
            drop_last=split == "train",
            collate_fn=stacked,
            num_workers=self.workers,
            **self.more,
        )

    def samples(self, split):
        return Rows42(self, split)


class LoadedByWorkers(Loaded):
    workers = 2


class LoadedAndKept(Loaded):
    """By workers that stay."""

    workers = 1
    more: ClassVar = {"persistent_workers": True}


class ByEpoch(Rows42):
    """Told of the epoch, which it adds."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, k):
        x, y = super().__getitem__(k)
        return x + self.epoch, y

    def only(self, parts):
        return copy.copy(self)


class ChosenByEpoch(MLPTask):
    def data(self, split):
        return ByEpoch(self, split)


class Unshuffled(FewSamples):
    """A loader of batches of 8 of 21 samples, the same ones each epoch."""

    drop_last = False

    def data(self, split):
        return DataLoader(super().data(split), batch_size=8, drop_last=self.drop_last)


class UnshuffledWithoutRest(Unshuffled):
    drop_last = True


class KeptByEpoch(ChosenByEpoch):
    def data(self, split):
        samples = super().data(split)
        return DataLoader(samples, batch_size=8, num_workers=1, persistent_workers=True)


class Noisy(Rows42):
    """With noise of all three generators, on inputs and targets."""

    def __getitem__(self, k):
        x, y = super().__getitem__(k)
        noise = torch.randn(()) + random.random() + np.random.normal()
        return x + 0.01 * noise, y + 0.01 * noise


class LoadedNoisy(Loaded):
    def samples(self, split):
        return Noisy(self, split)


class LoadedNoisyByWorkers(LoadedNoisy):
    workers = 2


class Flow(IterableDataset):
    def __init__(self, samples, length=True):
        self.samples, self.length = samples, length

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for k in range(first, len(self.samples), step):
            yield self.samples[k]

    def __len__(self):
        if not self.length:
            raise TypeError("nobody knows")
        return len(self.samples)


class Stream(MLPTask):
    """Sample after sample, 42 of them."""

    length = True

    def data(self, split):
        return Flow(Rows42(self, split), self.length)


class EndlessStream(Stream):
    """One that doesn't say how many there are."""

    length = False


class EndlessWithoutRest(EndlessStream):
    """Whole mini-batches alone."""

    def data(self, split):
        return DataLoader(super().data(split), batch_size=8, drop_last=True)


class StreamByWorkers(EndlessStream):
    """Each of two workers makes batches of its own share."""

    def data(self, split):
        return DataLoader(super().data(split), batch_size=8, num_workers=2)


class NoisyStreamKept(MLPTask):
    """With noise, by a worker that stays."""

    def data(self, split):
        samples = Flow(Noisy(self, split))
        return DataLoader(samples, batch_size=8, num_workers=1, persistent_workers=True)


class WrongBatches(Loaded):
    """Batches of 6 in mini-batches of 8."""

    def data(self, split):
        return DataLoader(self.samples(split), batch_size=6)


class Failing(Rows42):
    def __getitem__(self, k):
        if k == 23:
            raise ValueError("no such picture:\n23.png")
        return super().__getitem__(k)


class LoadedFailing(Loaded):
    def samples(self, split):
        return Failing(self, split) if split == "train" else Rows42(self, split)


class LoadedFailingByWorkers(LoadedFailing):
    workers = 2


class FailingSample(LoadedFailing):
    """Without a loader."""

    def data(self, split):
        return self.samples(split)


class Dying(Rows42):
    def __getitem__(self, k):
        if k == 23 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(k)


class LoadedDying(LoadedByWorkers):
    def samples(self, split):
        return Dying(self, split)


class BatchesOfEightAtOnce(MLPTask):
    """The data set gives whole batches, by a sampler of its own."""

    def data(self, split):
        x, y = (part[:40].reshape(5, 8, -1) for part in MLPTask.data(self, split).tensors)
        order = (3, 1, 4, 0, 2)
        return DataLoader(list(zip(x, y, strict=True)), batch_size=None, sampler=order)


class _Slow(Rows42):
    def __getitem__(self, k):
        time.sleep(2e-3)
        return super().__getitem__(k)


class Slow(Loaded):
    """2 ms a sample."""

    def samples(self, split):
        return _Slow(self, split)


# Samples that are read in parts -----------------------------------------------------------------

READ: Counter[tuple[str, str]] = Counter()
"""How often a part was read by whoever wanted these: ("target", "inputs") is a waste."""


class Pictures(Rows42):
    """Samples whose parts are read one by one."""

    parts = frozenset({"inputs", "target"})

    def __getitem__(self, k):
        return tuple(
            self.read(name, part, k) if name in self.parts else None
            for name, part in (("inputs", self.x), ("target", self.y))
        )

    def read(self, name, part, k):
        READ["+".join(sorted(self.parts)), name] += 1
        return part[k]

    def only(self, parts):
        found = copy.copy(self)
        found.parts = parts
        return found


class Album(MLPTask):
    """Samples are chosen by the run."""

    pictures = Pictures

    def data(self, split):
        return self.samples(split)

    def samples(self, split):
        return self.pictures(self, split)


class ShuffledAlbum(Album):
    """The same by a loader."""

    workers = 0

    def data(self, split):
        train = split == "train"
        samples = Subset(self.samples(split), range(1, 42))
        return DataLoader(samples, 8, shuffle=train, drop_last=train, num_workers=self.workers)


class Undivided(ShuffledAlbum):
    """Its samples can only be read as a whole."""

    pictures = Rows42


class OwnBatches(ShuffledAlbum):
    """The loader's own collate_fn wants whole samples."""

    def data(self, split):
        return DataLoader(self.samples(split), 8, collate_fn=stacked)


class Cropped(Pictures):
    """Random numbers of all three generators, other numbers of them for each part and sample."""

    def read(self, name, part, k):
        value = super().read(name, part, k)
        if name == "target":
            return value
        noise = torch.randn(()) + random.random() + np.random.normal()
        return value + 0.01 * noise + 0.01 * torch.rand(k % 3).sum()


class CroppedAlbum(Album):
    pictures = Cropped


class ShuffledCrops(ShuffledAlbum):
    pictures = Cropped


class ShuffledCropsByWorkers(ShuffledCrops):
    workers = 1


class _Both(Cropped):
    """Target and inputs are moved by the same number."""

    def __getitem__(self, k):
        shift = 0.1 * torch.randn(())
        return tuple(None if part is None else part + shift for part in super().__getitem__(k))


class Shifted(ShuffledAlbum):
    pictures = _Both


class ShiftedAndStill(Shifted):
    """Other samples are in memory."""

    def samples(self, split):
        still = MLPTask.data(self, split)
        return ConcatDataset([super().samples(split), Subset(still, range(3))])


class _Other(Pictures):
    def read(self, name, part, k):
        return super().read(name, part, k) + (len(self.parts) == 1 and name == self.wrong)


class _OtherInputs(_Other):
    wrong = "inputs"


class _OtherTargets(_Other):
    wrong = "target"


class OtherInputs(Album):
    pictures = _OtherInputs


class OtherTargets(ShuffledAlbum):
    pictures = _OtherTargets


class _Fewer(Pictures):
    def only(self, parts):
        return Subset(self, range(3))


class Fewer(Album):
    pictures = _Fewer


class _Apart(Pictures):
    """Puts whole samples together alone."""

    def collate_fn(self, samples):
        return stacked(samples)

    def only(self, parts):
        return Subset(super().only(parts), range(len(self)))


class Apart(Album):
    pictures = _Apart
