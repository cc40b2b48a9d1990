"""Samples for Hugging Face models of lengths of their own: mini-batches differ in shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..tasks.parts import Parts
from ..zoo.synthetic import IGNORED
from .data import HuggingFaceSamples, filled


class UnpaddedSamples(HuggingFaceSamples):
    """Rows as samples of their own lengths; a mini-batch is filled up to its longest."""

    own_lengths = True
    """Any mini-batch may have other shapes than those that were looked at."""

    def only(self, parts: Parts) -> HuggingFaceSamples:
        """As of samples of one length, where inputs alone are filled up: else how long a mini-batch
        is shows in both."""
        return super().only(parts) if self._request.family == "classification" else self

    def _filled(self, value: Tensor, length: int, filling: int) -> Tensor:
        return value[:length]

    def collate_fn(
        self, samples: Sequence[tuple[dict[str, Tensor], Tensor | None]]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs ``[samples, longest]`` and labels."""
        inputs = [sample for sample, _ in samples]
        labels = [torch.tensor(0) if label is None else label for _, label in samples]
        sequences = labels[0].dim() == 1 and self._request.family != "classification"
        made = ("labels",) if sequences else ()
        longest: dict[bool, int] = {}
        for sample, wanted in zip(inputs, labels, strict=True):
            for name, value in (*sample.items(), *((n, wanted) for n in made)):
                side = self._of_decoder(name)
                longest[side] = max(longest.get(side, 0), len(value))

        def together(name: str, values: Sequence[Tensor], filling: int) -> Tensor:
            length = longest[self._of_decoder(name)]
            return torch.stack([filled(value, length, filling) for value in values])

        return (
            {
                name: together(name, [each[name] for each in inputs], self._filling(name))
                for name in inputs[0]
            },
            together("labels", labels, IGNORED) if sequences else torch.stack(labels),
        )

    def _of_decoder(self, name: str) -> bool:
        """Whether it is as long as the labels of a sequence-to-sequence model."""
        return self._request.family == "seq2seq" and name.startswith(("decoder", "labels"))
