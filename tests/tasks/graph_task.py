"""A task whose graph is no chain: skips over stages, sizes and integers across cuts, dropout."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

WORDS, TIME = 13, 5


class Graph(nn.Module):
    """Two inputs; the tokens are used early, the mask late; `x` skips over several layers."""

    def __init__(self, dropout: float):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.mix = nn.Linear(6, 6)
        self.recur = nn.GRU(6, 6, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.act = nn.ReLU(inplace=True)
        self.wide = nn.Linear(6, 12)
        self.back = nn.Linear(12, 6)
        self.out = nn.Linear(6, WORDS)
        self.rate = dropout

    def forward(self, tokens, mask):
        batch, time = tokens.shape
        x = self.embed(tokens)
        flat = self.mix(x.reshape(batch * time, 6))
        y, last = self.recur(flat.view(x.shape))
        y = self.drop(y) + last.transpose(0, 1).expand(batch, time, 6)
        y = self.act(self.wide(y))
        y = functional.dropout(self.back(y), self.rate, training=self.training)
        return {"scores": self.out(y * mask + x), "kept": x}


class Tokens(Dataset):
    """Random sentences; the target is the sentence turned round."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, WORDS, (60, TIME), generator=generator)
        self.masks = torch.rand(60, TIME, 1, generator=generator, dtype=torch.float64)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, k):
        return (self.tokens[k], self.masks[k]), {"words": self.tokens[k].flip(0)}


class GraphTask:
    """Cross-entropy, and a small pull on what a layer far back made."""

    dropout = 0.0

    def model(self):
        return Graph(self.dropout).double()

    def data(self, split):
        return Tokens(1 if split == "train" else 2)

    def loss(self, output, target):
        scores = output["scores"].flatten(0, 1)
        pull = output["kept"].square().mean()
        return functional.cross_entropy(scores, target["words"].flatten()) + 0.01 * pull

    def metrics(self, output, target):
        return {"accuracy": (output["scores"].argmax(-1) == target["words"]).double().mean()}

    def optimizer(self, parameters):
        return torch.optim.Adam(parameters, lr=0.01)


class DropoutTask(GraphTask):
    """The same with dropout, as a module and as a function."""

    dropout = 0.3
