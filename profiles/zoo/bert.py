"""BERT with both heads of its pre-training (Devlin et al. 2019)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from .arguments import TransformerSettings, check_transformer, parse
from .layers import SelfAttention, embedding, linear, normal
from .synthetic import (
    Sampler,
    SyntheticTask,
    adamw,
    class_loss,
    integer,
    mask_tokens,
    progression,
    token_accuracy,
    token_loss,
)

DEVIATION = 0.02
"""Of the initial weights."""
EPSILON = 1e-12
"""Of the normalisations."""
PADDING_ID, MASK_ID, FIRST_ID = 0, 1, 2
"""Of the synthetic vocabulary: filling, a hidden token, the first real one."""


_BASE = TransformerSettings(vocabulary=30522, context=512, length=128)
SIZES = {"bert-base": _BASE, "bert-large": replace(_BASE, layers=24, width=1024, heads=16)}


class Layer(nn.Module):
    """A transformer layer, normalised behind each part: ``[m, length, width]`` → the same."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        width = settings.width
        self.attention = SelfAttention(
            width,
            settings.heads,
            settings.dropout,
            causal=False,
            deviation=DEVIATION,
            out_deviation=DEVIATION,
        )
        self.drop_1 = nn.Dropout(settings.dropout)
        self.norm_1 = nn.LayerNorm(width, EPSILON)
        self.intermediate = linear(width, 4 * width, DEVIATION)
        self.gelu = nn.GELU()
        self.output = linear(4 * width, width, DEVIATION)
        self.drop_2 = nn.Dropout(settings.dropout)
        self.norm_2 = nn.LayerNorm(width, EPSILON)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attention to where `mask`, ``[m, length]``, isn't 0; then the two linear layers."""
        x = self.norm_1(x + self.drop_1(self.attention(x, mask)))
        y = self.drop_2(self.output(self.gelu(self.intermediate(x))))
        result: Tensor = self.norm_2(x + y)
        return result


class Bert(nn.Module):
    """Ids ``[m, length]`` → (hidden ``[m, length, width]``, pooled ``[m, width]``)."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        width = settings.width
        self.length = settings.positions
        self.word_embeddings = embedding(settings.vocabulary, width, DEVIATION)
        self.token_type_embeddings = embedding(2, width, DEVIATION)
        self.position_embeddings = embedding(settings.context, width, DEVIATION)
        self.norm = nn.LayerNorm(width, EPSILON)
        self.dropout = nn.Dropout(settings.dropout)
        self.layer = nn.ModuleList([Layer(settings) for _ in range(settings.layers)])
        self.pooler = linear(width, width, DEVIATION)
        self.tanh = nn.Tanh()

    def forward(self, tokens: Tensor, token_types: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The last layer's output, and what the pooler makes of its first position."""
        x = self.word_embeddings(tokens) + self.position_embeddings.weight[: self.length]
        x = self.dropout(self.norm(x + self.token_type_embeddings(token_types)))
        for layer in self.layer:
            x = layer(x, mask)
        return x, self.tanh(self.pooler(x[:, 0]))


class BertForPreTraining(nn.Module):
    """Ids, segment ids and mask, int64 ``[m, length]`` → the scores of both heads.

    The result has "tokens" ``[m, length, vocabulary]``, for the hidden tokens, and "order"
    ``[m, 2]``, for whether the second segment follows upon the first (0) or not (1).
    """

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        width = settings.width
        self.bert = Bert(settings)
        self.order = linear(width, 2, DEVIATION)
        self.transform = linear(width, width, DEVIATION)
        self.gelu = nn.GELU()
        self.norm = nn.LayerNorm(width, EPSILON)
        self.decoder = nn.Linear(width, settings.vocabulary, device="meta")
        own = (settings.vocabulary, width)
        shared = self.bert.word_embeddings.weight
        self.decoder.weight = shared if settings.tied else normal(own, DEVIATION)
        self.decoder.bias = nn.Parameter(torch.zeros(settings.vocabulary))

    def forward(self, tokens: Tensor, token_types: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Scores of the hidden tokens and of the segments' order."""
        x, pooled = self.bert(tokens, token_types, mask)
        order = self.order(pooled)
        return {"tokens": self.decoder(self.norm(self.gelu(self.transform(x)))), "order": order}


def segment_pairs(length: int, vocabulary: int) -> Sampler:
    """Two segments, the second following upon the first in half of the samples.

    Inputs are (ids, segment ids, mask), each int64 ``[length]``; up to a quarter is padding.
    The target has "tokens" ``[length]``, labels of the hidden ids, and "order", 0 or 1.
    """

    def sample(generator: torch.Generator) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        used = integer(generator, length - length // 4, length + 1)
        half = used // 2
        order = integer(generator, 0, 2)
        ids = progression(generator, length, FIRST_ID, vocabulary)
        if order:
            ids[half:] = progression(generator, length - half, FIRST_ID, vocabulary)
        ids[used:] = PADDING_ID
        positions = torch.arange(length)
        token_types = ((positions >= half) & (positions < used)).long()
        ids, labels = mask_tokens(generator, ids, used, MASK_ID)
        inputs = (ids, token_types, (positions < used).long())
        return inputs, {"tokens": labels, "order": torch.tensor(order)}

    return sample


def both_losses(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """The sum of both heads' cross-entropies (Devlin et al. 2019, appendix A.2)."""
    tokens = token_loss(output["tokens"], target["tokens"])
    return tokens + class_loss(output["order"], target["order"])


def make_task(name: str, argument: str | None) -> SyntheticTask:
    """The task of the target `name`, a key of SIZES. Raises TargetError."""
    settings = parse(name, argument, SIZES[name])
    check_transformer(name, settings)

    def correct(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
        return token_accuracy(output["tokens"], target["tokens"])

    return SyntheticTask(
        build=lambda: BertForPreTraining(settings),
        sampler=segment_pairs(settings.positions, settings.vocabulary),
        criterion=both_losses,
        correct=correct,
        make_optimizer=adamw,
    )
