"""GPT-2 (Radford et al. 2019) of any size, up to GPT-3's (Brown et al. 2020, table 2.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor, nn

from .arguments import check_transformer, parse
from .layers import SelfAttention, embedding, linear, normal
from .synthetic import SyntheticTask, adamw, next_tokens, token_accuracy, token_loss

DEVIATION = 0.02
"""Of the initial weights."""


@dataclass(frozen=True)
class GPT2Settings:
    """Shape of the model; `length` of the samples is the context where it is None.

    With `tied` 0 the head has weights of its own, so that it needn't share the embedding's stage.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    context: int = 1024
    dropout: float = 0.1
    length: int | None = None
    tied: int = 1


SIZES = {
    "gpt2": GPT2Settings(),
    "gpt2-medium": GPT2Settings(layers=24, width=1024, heads=16),
    "gpt2-large": GPT2Settings(layers=36, width=1280, heads=20),
    "gpt2-xl": GPT2Settings(layers=48, width=1600, heads=25),
}


class Block(nn.Module):
    """A transformer layer, normalised before each part: ``[m, length, width]`` → the same."""

    def __init__(self, settings: GPT2Settings) -> None:
        super().__init__()
        width = settings.width
        # Two sums on the residual path per layer: so its variance doesn't grow with depth.
        out_deviation = DEVIATION / math.sqrt(2 * settings.layers)
        self.ln_1 = nn.LayerNorm(width)
        self.attn = SelfAttention(
            width,
            settings.heads,
            settings.dropout,
            causal=True,
            deviation=DEVIATION,
            out_deviation=out_deviation,
        )
        self.drop_1 = nn.Dropout(settings.dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp_in = linear(width, 4 * width, DEVIATION)
        self.gelu = nn.GELU(approximate="tanh")
        self.mlp_out = linear(4 * width, width, out_deviation)
        self.drop_2 = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the two linear layers, each added to what it came from."""
        x = x + self.drop_1(self.attn(self.ln_1(x)))
        y: Tensor = self.drop_2(self.mlp_out(self.gelu(self.mlp_in(self.ln_2(x)))))
        return x + y


class GPT2(nn.Module):
    """Token ids ``[m, length]`` → scores of the next token ``[m, length, vocabulary]``."""

    def __init__(self, settings: GPT2Settings) -> None:
        super().__init__()
        width = settings.width
        self.length = settings.length or settings.context
        self.wte = embedding(settings.vocabulary, width, DEVIATION)
        self.wpe = embedding(settings.context, width, DEVIATION)
        self.drop = nn.Dropout(settings.dropout)
        self.h = nn.Sequential(*[Block(settings) for _ in range(settings.layers)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, settings.vocabulary, bias=False, device="meta")
        own = (settings.vocabulary, width)
        self.lm_head.weight = self.wte.weight if settings.tied else normal(own, DEVIATION)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token at every position."""
        x = self.drop(self.wte(tokens) + self.wpe.weight[: self.length])
        logits: Tensor = self.lm_head(self.ln_f(self.h(x)))
        return logits


def make_task(name: str, argument: str | None) -> SyntheticTask:
    """The task of the target `name`, a key of SIZES. Raises TargetError."""
    settings = parse(name, argument, SIZES[name])
    length = settings.length or settings.context
    check_transformer(name, settings, length)
    settings = replace(settings, length=length)
    return SyntheticTask(
        build=lambda: GPT2(settings),
        sampler=next_tokens(length, settings.vocabulary),
        criterion=token_loss,
        correct=token_accuracy,
        perplexity=True,
        make_optimizer=adamw,
    )
