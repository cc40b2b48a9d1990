"""Synthetic samples, made on demand from their index, and the task that trains on them.

The samples follow rules that a model can learn, so that losses fall in a benchmark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from ..tasks.parts import INPUTS, Parts
from ..tasks.task import Split

SIZES: dict[Split, int] = {"train": 2048, "test": 256}
"""Samples in each split."""
FIRST_SEED: dict[Split, int] = {"train": 1_000_000, "test": 2_000_000}
"""Seed of a split's first sample; those of classes are below."""
IGNORED = -100
"""Label of a position that the loss leaves out (torch's own convention)."""
_LARGEST = 700.0
"""Of what a float holds e to the power of."""
NOISE = 0.1
"""Share of the tokens that are drawn at random."""

Sampler = Callable[[torch.Generator], tuple[Any, Any]]
"""Makes one sample, (inputs, target), from random numbers."""


class Synthetic(Dataset[Any]):
    """Samples that depend on nothing but the split and their index."""

    def __init__(self, sampler: Sampler, split: Split) -> None:
        self.sampler = sampler
        self.split: Split = split

    def __len__(self) -> int:
        return SIZES[self.split]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.sampler(torch.Generator().manual_seed(FIRST_SEED[self.split] + index))

    def only(self, parts: Parts) -> Synthetic:
        """A class is known before its image is made."""
        if INPUTS in parts or not isinstance(self.sampler, Labelled):
            return self
        return Synthetic(self.sampler.target, self.split)


@dataclass(frozen=True)
class SyntheticTask:
    """A task (see `profiles.tasks.task.Task`) put together from its parts.

    Attributes:
        build: makes the model.
        sampler: makes a sample.
        criterion: (output, target) → loss: a mean, or (sum, weight).
        correct: (output, target) → share of right answers, or (right answers, answers).
        make_optimizer: parameters → optimizer.
        perplexity: the loss is one of tokens, and evaluation tells e to its power.
    """

    build: Callable[[], nn.Module]
    sampler: Sampler
    criterion: Callable[[Any, Any], Any]
    correct: Callable[[Any, Any], Any]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    perplexity: bool = False

    def model(self) -> nn.Module:
        return self.build()

    def data(self, split: Split) -> Synthetic:
        return Synthetic(self.sampler, split)

    def loss(self, output: Any, target: Any) -> Any:
        return self.criterion(output, target)

    def metrics(self, output: Any, target: Any) -> dict[str, Any]:
        return {"accuracy": self.correct(output, target)}

    def figures(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": perplexity(means["loss"])} if self.perplexity else {}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self.make_optimizer(parameters)


def integer(generator: torch.Generator, low: int, high: int) -> int:
    """A random integer, low ≤ k < high."""
    return int(torch.randint(low, high, (), generator=generator))


def pattern(label: int, shape: tuple[int, ...]) -> Tensor:
    """What all samples of a class have in common."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(label))


@dataclass(frozen=True)
class Labelled:
    """A sampler whose samples are made for a class, which is drawn first and is the target.

    Attributes:
        make: of a class and random numbers, the inputs.
    """

    classes: int
    make: Callable[[int, torch.Generator], Any]

    def __call__(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        label = integer(generator, 0, self.classes)
        return self.make(label, generator), torch.tensor(label)

    def target(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        """The sample without its inputs."""
        return 0, torch.tensor(integer(generator, 0, self.classes))


def images(size: int, classes: int) -> Labelled:
    """Images ``[3, size, size]`` with their class: coarse coloured squares under noise.

    The variance of the pixels is 1.
    """

    def image(label: int, generator: torch.Generator) -> Tensor:
        squares = functional.interpolate(pattern(label, (1, 3, 4, 4)), size=size)[0]
        noise = torch.randn(3, size, size, generator=generator)
        return (squares + noise) / math.sqrt(2)

    return Labelled(classes, image)


def vectors(inputs: int, classes: int) -> Labelled:
    """Vectors ``[inputs]`` with their class: the class's own vector under noise, variance 1."""

    def vector(label: int, generator: torch.Generator) -> Tensor:
        noise = torch.randn(inputs, generator=generator)
        return (pattern(label, (inputs,)) + noise) / math.sqrt(2)

    return Labelled(classes, vector)


def progression(generator: torch.Generator, length: int, first: int, vocabulary: int) -> Tensor:
    """Token ids ``[length]``, first ≤ id < vocabulary, rising by a fixed step but for noise."""
    count = vocabulary - first
    start, step = integer(generator, 0, count), integer(generator, 1, min(count, 8))
    ids = (start + step * torch.arange(length)) % count
    drawn = torch.randint(0, count, (length,), generator=generator)
    noisy = torch.rand(length, generator=generator) < NOISE
    return torch.where(noisy, drawn, ids) + first


def next_tokens(length: int, vocabulary: int) -> Sampler:
    """Token ids ``[length]``; the target is the ids one position later."""

    def sample(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = progression(generator, length + 1, 0, vocabulary)
        return ids[:-1], ids[1:]

    return sample


def mask_tokens(
    generator: torch.Generator, ids: Tensor, used: int, mask_id: int
) -> tuple[Tensor, Tensor]:
    """Hide 15 % of the first `used` ids, at least one (Devlin et al. 2019, section 3.1).

    Returns:
        The ids with `mask_id` in the hidden places, and labels: the hidden ids, IGNORED elsewhere.
    """
    hidden = torch.randperm(used, generator=generator)[: max(1, round(0.15 * used))]
    labels = torch.full_like(ids, IGNORED)
    labels[hidden] = ids[hidden]
    masked = ids.clone()
    masked[hidden] = mask_id
    return masked, labels


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of scores ``[m, classes]`` and labels ``[m]``."""
    return functional.cross_entropy(logits, labels)


def class_accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of samples whose class has the highest score."""
    return (logits.argmax(1) == labels).double().mean()


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of scores ``[m, length, vocabulary]`` and labels ``[m, length]``.

    A mean over positions within each sample, then over samples: so samples with unlike numbers
    of labels weigh the same however they are divided into micro-batches.
    """
    losses = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return _mean_per_sample(losses.view(labels.shape), labels)


def token_accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of the labelled positions whose token has the highest score, averaged alike."""
    return _mean_per_sample((logits.argmax(-1) == labels).double(), labels)


def counted_token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over all labelled positions of the samples, and their number.

    As Hugging Face's models have it: each label weighs the same, whatever sample it is of.
    """
    total = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (labels != IGNORED).sum()


def counted_token_accuracy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """How many labelled positions have the highest score at their token, and their number."""
    return (logits.argmax(-1) == labels).sum(), (labels != IGNORED).sum()


def perplexity(loss: float) -> float:
    """Of tokens: e to the power of their mean loss."""
    return math.exp(loss) if loss < _LARGEST else math.inf


def _mean_per_sample(figures: Tensor, labels: Tensor) -> Tensor:
    labelled = labels != IGNORED
    return ((figures * labelled).sum(1) / labelled.sum(1)).mean()


def sgd(parameters: Iterable[nn.Parameter], rate: float = 0.01) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum 0.9."""
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter], rate: float = 3e-4) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019)."""
    return torch.optim.AdamW(parameters, lr=rate)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam (Kingma and Ba 2015)."""
    return torch.optim.Adam(parameters, lr=1e-3)
