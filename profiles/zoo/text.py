"""Next-character prediction on any text file with a small GPT.

Without a file it learns from the help texts that ship with Python (pydoc's topics).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from ..errors import FileError, TargetError
from ..files import check_regular
from ..tasks.parts import Parts
from ..tasks.task import Split
from .synthetic import perplexity

CONTEXT = 64
"""Characters that the model sees at once."""
MAX_CHARACTERS = 2_000_000
"""A longer file is read up to here."""


class Attention(nn.Module):
    """Causal self-attention over ``[m, time, width]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Each position attends to itself and those before it."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.head_width))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[m, time, width]`` → the same."""
        x = x + self.attn(self.ln1(x))
        return x + self.proj(self.gelu(self.fc(self.ln2(x))))  # type: ignore[no-any-return]


class CharGPT(nn.Module):
    """Characters ``[m, time]`` → scores of the next one ``[m, time, vocabulary]``."""

    def __init__(self, vocabulary: int, width: int = 128, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of the next character at every position."""
        x = self.characters(text) + self.positions
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


class Windows(Dataset[Any]):
    """Windows of CONTEXT characters; the target is the window one character later."""

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    def __len__(self) -> int:
        return (len(self.codes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * CONTEXT
        window = self.codes[start : start + CONTEXT + 1]
        return window[:-1], window[1:]

    def only(self, parts: Parts) -> Windows:
        """Either part is a view: there is no reading to save, but putting together."""
        return self


class Text:
    """The last tenth of the text is for testing."""

    def __init__(self, path: str | None = None) -> None:
        text = _read(path)
        self.alphabet = sorted(set(text))
        code = {character: k for k, character in enumerate(self.alphabet)}
        self.codes = torch.tensor([code[character] for character in text], dtype=torch.int64)
        if len(self.codes) < 20 * CONTEXT:
            raise TargetError(
                f"text:{path}: only {len(text)} characters; give a text of {20 * CONTEXT} or more"
            )

    def model(self) -> nn.Module:
        return CharGPT(len(self.alphabet))

    def data(self, split: Split) -> Windows:
        border = len(self.codes) * 9 // 10
        return Windows(self.codes[:border] if split == "train" else self.codes[border:])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(-1) == target).double().mean()}

    def figures(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": perplexity(means["loss"])}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-3)


def make_task(name: str, argument: str | None) -> Text:
    """The task on the file that stands behind the colon. Raises TargetError."""
    return Text(argument)


def _read(path: str | None) -> str:
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))[:MAX_CHARACTERS]
    try:
        check_regular(Path(path))
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_CHARACTERS)
    except FileError as error:
        raise TargetError(f"text:{error}") from None
    except OSError as error:
        raise TargetError(f"text:{path}: can't be read: {error.strerror}") from None
