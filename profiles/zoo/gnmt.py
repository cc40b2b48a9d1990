"""A recurrent translator after GNMT (Wu et al. 2016, section 3), trained by teacher forcing.

One thing is unlike the paper: there the attention's context of one step also enters the
decoder's first layer at the next, which forces that layer to run step by step. Here it goes to
all layers above the first, so that every layer runs over the whole sequence at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .arguments import parse, wrong
from .synthetic import Sampler, SyntheticTask, adam, progression, token_accuracy, token_loss

START_ID, FIRST_ID = 0, 1
"""Of the vocabulary: what the decoder sees first, and the first real token."""


@dataclass(frozen=True)
class GNMTSettings:
    """Layers of the encoder and as many of the decoder; width; tokens; length of the samples."""

    layers: int = 8
    width: int = 1024
    vocabulary: int = 32000
    length: int = 50
    dropout: float = 0.2


class Recurrent(nn.Module):
    """Dropout and an LSTM: ``[m, length, inside]`` → ``[m, length, width]``, or 2 width.

    `inside` counts the context's width too, where there is one.
    """

    def __init__(
        self, inside: int, width: int, dropout: float, *, bidirectional: bool = False
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(inside, width, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The hidden states of all positions; the context joins behind the dropout."""
        x = self.dropout(x)
        if context is not None:
            x = torch.cat([x, context], -1)
        result: Tensor = self.lstm(x)[0]
        return result


class Attention(nn.Module):
    """Additive attention (Bahdanau et al. 2015, appendix A.1.2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.tanh = nn.Tanh()
        self.score = nn.Linear(width, 1, bias=False)
        self.softmax = nn.Softmax(-1)

    def forward(self, decoded: Tensor, encoded: Tensor) -> Tensor:
        """``[m, targets, width]``, ``[m, sources, width]`` → contexts ``[m, targets, width]``."""
        pairs = self.tanh(self.query(decoded).unsqueeze(2) + self.key(encoded).unsqueeze(1))
        return torch.matmul(self.softmax(self.score(pairs).squeeze(-1)), encoded)


class Encoder(nn.Module):
    """Token ids ``[m, length]`` → ``[m, length, width]``."""

    def __init__(self, settings: GNMTSettings) -> None:
        super().__init__()
        width, dropout = settings.width, settings.dropout
        self.embedding = nn.Embedding(settings.vocabulary, width)
        self.first = Recurrent(width, width, dropout, bidirectional=True)
        self.second = Recurrent(2 * width, width, dropout)
        self.rest = nn.ModuleList(
            [Recurrent(width, width, dropout) for _ in range(settings.layers - 2)]
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """The hidden states of the last layer; from the third layer on, each adds its input."""
        x: Tensor = self.second(self.first(self.embedding(tokens)))
        for layer in self.rest:
            x = x + layer(x)
        return x


class Decoder(nn.Module):
    """Token ids ``[m, length]`` and the encoder's states → ``[m, length, width]``."""

    def __init__(self, settings: GNMTSettings) -> None:
        super().__init__()
        width, dropout = settings.width, settings.dropout
        self.embedding = nn.Embedding(settings.vocabulary, width)
        self.first = Recurrent(width, width, dropout)
        self.attention = Attention(width)
        self.second = Recurrent(2 * width, width, dropout)
        self.rest = nn.ModuleList(
            [Recurrent(2 * width, width, dropout) for _ in range(settings.layers - 2)]
        )

    def forward(self, tokens: Tensor, encoded: Tensor) -> Tensor:
        """The hidden states of the last layer; from the third layer on, each adds its input."""
        x: Tensor = self.first(self.embedding(tokens))
        context = self.attention(x, encoded)
        x = self.second(x, context)
        for layer in self.rest:
            x = x + layer(x, context)
        return x


class GNMT(nn.Module):
    """Source and target ids ``[m, length]`` → scores ``[m, length, vocabulary]``."""

    def __init__(self, settings: GNMTSettings) -> None:
        super().__init__()
        self.encoder = Encoder(settings)
        self.decoder = Decoder(settings)
        self.classifier = nn.Linear(settings.width, settings.vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Scores of the token that follows upon each of the target's."""
        logits: Tensor = self.classifier(self.decoder(target, self.encoder(source)))
        return logits


def translations(length: int, vocabulary: int) -> Sampler:
    """((source, target shifted by one), target), ``[length]`` each; id k translates to k + 1."""

    def sample(generator: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        source = progression(generator, length, FIRST_ID, vocabulary)
        target = (source + 1 - FIRST_ID) % (vocabulary - FIRST_ID) + FIRST_ID
        return (source, torch.cat([torch.tensor([START_ID]), target[:-1]])), target

    return sample


def make_task(name: str, argument: str | None) -> SyntheticTask:
    """The task of target `gnmt`. Raises TargetError for a wrong argument."""
    settings = parse(name, argument, GNMTSettings())
    if settings.layers < 2:
        raise wrong(name, "layers=1: 2 is the least", vars(settings))
    return SyntheticTask(
        build=lambda: GNMT(settings),
        sampler=translations(settings.length, settings.vocabulary),
        criterion=token_loss,
        correct=token_accuracy,
        make_optimizer=adam,
    )
