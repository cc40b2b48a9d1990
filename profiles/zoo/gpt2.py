"""GPT-2 (Radford et al. 2019) of any size, up to GPT-3's (Brown et al. 2020, table 2.1)."""

from __future__ import annotations

import math

from torch import Tensor, nn

from .arguments import TransformerSettings, check_transformer, parse
from .layers import SelfAttention, embedding, linear, normal
from .synthetic import SyntheticTask, adamw, next_tokens, token_accuracy, token_loss

DEVIATION = 0.02
"""Of the initial weights."""


SIZES = {
    "gpt2": TransformerSettings(),
    "gpt2-medium": TransformerSettings(layers=24, width=1024, heads=16),
    "gpt2-large": TransformerSettings(layers=36, width=1280, heads=20),
    "gpt2-xl": TransformerSettings(layers=48, width=1600, heads=25),
}


class Block(nn.Module):
    """A transformer layer, normalised before each part: ``[m, length, width]`` → the same."""

    def __init__(self, settings: TransformerSettings) -> None:
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

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        width = settings.width
        self.length = settings.positions
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
    check_transformer(name, settings)
    return SyntheticTask(
        build=lambda: GPT2(settings),
        sampler=next_tokens(settings.positions, settings.vocabulary),
        criterion=token_loss,
        correct=token_accuracy,
        perplexity=True,
        make_optimizer=adamw,
    )
