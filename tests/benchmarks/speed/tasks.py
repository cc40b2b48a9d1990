"""The models that are raced, as tasks for tp-profile and tp-run.

Every model is a chain of modules, so that a rival which takes lists of layers can cut it where it
likes. All train on random samples, by SGD with momentum 0.9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from timeprest.profiles.tasks.task import Split
from timeprest.profiles.zoo.resnet import Bottleneck
from timeprest.profiles.zoo.text import Block
from timeprest.profiles.zoo.vgg import CHANNELS, CONVOLUTIONS
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

VOCABULARY, LENGTH = 1000, 64
"""Of the models of language: tokens, and how many of them are a sample."""
CLASSES = 100
"""Of the models of images."""
MINI_BATCHES = 64
"""In the data: more than a run has, so that no sample is seen twice."""


class Embedding(nn.Module):
    """Token ids ``[m, length]`` → ``[m, length, width]``, with a vector for each position."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The sum of both vectors."""
        x: Tensor = self.tokens(tokens) + self.positions
        return x


class Recurrent(nn.Module):
    """An LSTM layer beside a shortcut: ``[m, length, width]`` → the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The input plus the hidden states of all positions."""
        y: Tensor = self.lstm(x)[0]
        return x + y


def gpt() -> nn.Sequential:
    """GPT shape: 8 layers, width 256, 8 heads, head with weights of its own."""
    width = 256
    blocks = [Block(width, heads=8) for _ in range(8)]
    head = [nn.LayerNorm(width), nn.Linear(width, VOCABULARY)]
    return nn.Sequential(Embedding(width, LENGTH), *blocks, *head)


def gpt_wide() -> nn.Sequential:
    """GPT shape that keeps a GPU busy: 12 layers, width 1024, 16 heads, 256 tokens."""
    width = 1024
    blocks = [Block(width, heads=16) for _ in range(12)]
    head = [nn.LayerNorm(width), nn.Linear(width, VOCABULARY)]
    return nn.Sequential(Embedding(width, 4 * LENGTH), *blocks, *head)


def lstm() -> nn.Sequential:
    """The encoder of GNMT in small: 8 residual LSTM layers of width 256, and a head."""
    width = 256
    layers = [Recurrent(width) for _ in range(8)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *layers, nn.Linear(width, VOCABULARY))


def _features(convolutions: tuple[int, ...]) -> list[nn.Module]:
    """VGG's convolutions, with a pooling behind each group."""
    layers: list[nn.Module] = []
    inside = 3
    for count, outside in zip(convolutions, CHANNELS, strict=True):
        for _ in range(count):
            convolution = nn.Conv2d(inside, outside, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight)
            layers += [convolution, nn.ReLU()]
            inside = outside
        layers.append(nn.MaxPool2d(2))
    return layers


def vgg11() -> nn.Sequential:
    """VGG-11 shape for 3×32×32: 8 convolutions without BatchNorm, two linear layers of 512."""
    linear = [nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES)]
    return nn.Sequential(*_features(CONVOLUTIONS["vgg11"]), *linear)


def vgg16() -> nn.Sequential:
    """VGG-16 shape for 3×32×32: 13 convolutions, and linear layers of 4096 as published."""
    wide = [nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    head = nn.Linear(4096, CLASSES)
    return nn.Sequential(*_features(CONVOLUTIONS["vgg16"]), nn.Flatten(), *wide, head)


def resnet50() -> nn.Sequential:
    """ResNet-50 for 3×64×64."""
    layers: list[nn.Module] = [
        nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
    ]
    inside = 64
    for group, count in enumerate((3, 4, 6, 3)):
        width = 64 * 2**group
        for k in range(count):
            stride = 2 if group and not k else 1
            layers.append(Bottleneck(inside, width, stride))
            inside = 4 * width
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, CLASSES))
    return nn.Sequential(*layers, head)


def tokens(length: int) -> Callable[[int], TensorDataset]:
    """Random token ids, and the ids one position later."""

    def make(samples: int) -> TensorDataset:
        ids = torch.randint(VOCABULARY, (samples, length + 1))
        return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())

    return make


def images(size: int) -> Callable[[int], TensorDataset]:
    """Random images ``[3, size, size]`` with random classes."""

    def make(samples: int) -> TensorDataset:
        pixels = torch.randn(samples, 3, size, size)
        return TensorDataset(pixels, torch.randint(CLASSES, (samples,)))

    return make


@dataclass(frozen=True)
class Race:
    """A model with all that training it needs: a task (see `timeprest.profiles.tasks.task`).

    Attributes:
        title: for people.
        build: makes the chain of modules.
        sample: makes so many samples.
        mini_batch: samples in a mini-batch.
        rate: learning rate: so low that no system diverges, with gradients of weights that are many
            updates old.
        fused: step with torch's fused kernel; otherwise by torch's own choice.
    """

    title: str
    build: Callable[[], nn.Sequential]
    sample: Callable[[int], TensorDataset]
    mini_batch: int
    rate: float = 0.001
    fused: bool | None = None

    def model(self) -> nn.Sequential:
        return self.build()

    def data(self, split: Split) -> TensorDataset:
        with torch.random.fork_rng():
            torch.manual_seed(1 if split == "train" else 2)
            return self.sample(self.mini_batch * (MINI_BATCHES if split == "train" else 1))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, -2), target.flatten())

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.rate, momentum=0.9, fused=self.fused)


GPT = Race("GPT: 8 layers, width 256, 64 of 1000 tokens, mini-batch 16", gpt, tokens(LENGTH), 16)
VGG11 = Race("VGG-11 without BatchNorm, 3×32×32, mini-batch 32", vgg11, images(32), 32)
RESNET50 = Race("ResNet-50, 3×64×64, mini-batch 16", resnet50, images(64), 16)
LSTM = Race("8 LSTM layers, width 256, 64 of 1000 tokens, mini-batch 32", lstm, tokens(LENGTH), 32)
VGG16 = Race("VGG-16, 3×32×32, mini-batch 32", vgg16, images(32), 32)
GPT_WIDE = Race(
    "GPT: 12 layers, width 1024, 256 of 1000 tokens, mini-batch 32",
    gpt_wide,
    tokens(4 * LENGTH),
    32,
)
VGG16_LARGE = Race("VGG-16, 3×32×32, mini-batch 512", vgg16, images(32), 512)

RACES = {"gpt": GPT, "vgg11": VGG11, "resnet50": RESNET50, "lstm": LSTM}
"""The models of the speed tables."""
MEMORY_RACES = {"vgg16": VGG16, "resnet50": RESNET50}
"""Those of the tables of memory; the first has weights that are heavy on a slow wire."""
GPU_RACES = {"gpt_wide": GPT_WIDE, "vgg16_large": VGG16_LARGE, "resnet50": RESNET50}
"""Those of docs/gpu.md: two that keep a large GPU busy, and one whose kernels are short."""
ALL_RACES = {**RACES, **MEMORY_RACES, **GPU_RACES}


def target_of(name: str) -> str:
    """What tp-profile is to be given."""
    return f"{__name__}:{name.upper()}"
