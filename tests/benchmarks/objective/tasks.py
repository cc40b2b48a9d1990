"""What choosing by a study is tried on: four small tasks that nothing was fitted on."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from timeprest.profiles.tasks.task import Split
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

PIXELS, WIDTH, DEPTH = 64, 32, 8
SAMPLES = {"train": 4096, "test": 512}
LETTERS, LENGTH = 6, 10
HIDDEN, LAYERS = 16, 6
SEEN, CHANNELS = 16, 8
TOKENS, MIXED = 8, 16


@cache
def images(split: Split) -> TensorDataset:
    """scikit-learn's digits, ``[64]``, which are to be made again."""
    from sklearn.datasets import load_digits

    found = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    found = found[:-200] if split == "train" else found[-200:]
    return TensorDataset(found, found)


@cache
def words(split: Split) -> TensorDataset:
    """Ten letters of six, ``[10]``, and which of them comes most often, the first of equals."""
    drawn = torch.Generator().manual_seed(3 + (split == "test"))
    letters = torch.randint(LETTERS, (SAMPLES[split], LENGTH), generator=drawn)
    counts = torch.stack([(letters == k).sum(1) for k in range(LETTERS)], 1)
    return TensorDataset(letters, (counts * LETTERS - torch.arange(LETTERS)).argmax(1))


@cache
def sines(split: Split) -> TensorDataset:
    """Sixteen values of a sum of three sines with noise, ``[1, 16]``, and the one after them."""
    drawn = torch.Generator().manual_seed(5 + (split == "test"))
    count = SAMPLES[split]
    speed, phase, height = (torch.rand(3, count, 3, 1, generator=drawn)).unbind()
    at = torch.arange(SEEN + 1.0)
    values = (height * torch.sin((0.2 + speed) * at + 6.3 * phase)).sum(1)
    values += 0.005 * torch.randn(count, SEEN + 1, generator=drawn)
    return TensorDataset(values[:, None, :-1], values[:, -1:])


@cache
def scanned(split: Split) -> TensorDataset:
    """scikit-learn's digits, row by row, ``[8, 8]``, and which they are."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    found = torch.tensor(digits.images, dtype=torch.float32) / 16
    kinds = torch.tensor(digits.target)
    part = slice(-200) if split == "train" else slice(-200, None)
    return TensorDataset(found[part], kinds[part])


class Block(nn.Module):
    """Two linear layers around which their input goes, too: ``[m, 32]``."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.outside(torch.tanh(self.inside(x)))
        return x + added


class Regression:
    """A perceptron of eight blocks that makes images of digits again."""

    def model(self) -> nn.Module:
        blocks = [Block() for _ in range(DEPTH)]
        return nn.Sequential(nn.Linear(PIXELS, WIDTH), *blocks, nn.Linear(WIDTH, PIXELS))

    def data(self, split: Split) -> TensorDataset:
        return images(split)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Recurrent(nn.Module):
    """One layer of an LSTM around which its input goes, too: ``[m, 10, 16]``."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.lstm(x)[0]
        return x + added


class Letters:
    """Which letter comes most often: an LSTM of six layers."""

    def model(self) -> nn.Module:
        layers = [Recurrent() for _ in range(LAYERS)]
        head = [nn.Flatten(), nn.Linear(LENGTH * HIDDEN, LETTERS)]
        return nn.Sequential(nn.Embedding(LETTERS, HIDDEN), *layers, *head)

    def data(self, split: Split) -> TensorDataset:
        return words(split)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.005)


class Convolved(nn.Module):
    """A convolution over time around which its input goes, too: ``[m, 8, 16]``."""

    def __init__(self) -> None:
        super().__init__()
        self.over_time = nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.over_time(x))


class Waves:
    """The next value of a wave: eight convolutions over time."""

    def model(self) -> nn.Module:
        layers = [Convolved() for _ in range(DEPTH)]
        head = [nn.Flatten(), nn.Linear(CHANNELS * SEEN, 1)]
        return nn.Sequential(nn.Conv1d(1, CHANNELS, 3, padding=1), *layers, *head)

    def data(self, split: Split) -> TensorDataset:
        return sines(split)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Mixer(nn.Module):
    """Rows are mixed with each other, then each row's features: ``[m, 8, 16]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(MIXED), nn.LayerNorm(MIXED)
        self.across, self.within = nn.Linear(TOKENS, TOKENS), nn.Linear(MIXED, MIXED)

    def forward(self, x: Tensor) -> Tensor:
        x = x + functional.gelu(self.across(self.first(x).mT)).mT
        added: Tensor = functional.gelu(self.within(self.second(x)))
        return x + added


class Rows:
    """Which digit it is, read row by row: eight mixers."""

    def model(self) -> nn.Module:
        layers = [Mixer() for _ in range(DEPTH)]
        head = [nn.Flatten(), nn.Linear(TOKENS * MIXED, 10)]
        return nn.Sequential(nn.Linear(8, MIXED), *layers, *head)

    def data(self, split: Split) -> TensorDataset:
        return scanned(split)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.002)


regression = Regression()
letters = Letters()
waves = Waves()
rows = Rows()
