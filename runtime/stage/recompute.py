"""Recomputation: a forward is run a second time before its backward, to the same result.

Kept until then are the piece's inputs and the state of the random generator. Buffers that the
forward changes (running statistics) keep what the first run made of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..prepare.data import MicroBatchPart
from ..prepare.devices import CPU, random_state, set_random_state


@dataclass
class ForwardInputs:
    """What a forward is recomputed from.

    Attributes:
        values: the piece's inputs by name.
        nbytes: of those that were received; the model's own inputs count nothing, as everywhere.
        random: state of the random generators before the first run.
    """

    values: dict[str, Tensor]
    target: Any
    part: MicroBatchPart
    nbytes: int
    random: Tensor


class Recomputation:
    """Keeps the inputs of one stage's forwards, and restores what they ran under.

    A forward may overwrite what it gets. Which inputs are overwritten shows in the first
    run; until then all are copied, and only those after that.
    """

    def __init__(self, module: nn.Module, device: torch.device = CPU) -> None:
        self._device = device
        self._buffers = list(module.buffers())
        self._overwritten: set[str] | None = None
        self._given: dict[str, tuple[Tensor, int]] = {}

    def keep(
        self,
        values: Mapping[str, Tensor],
        received: Collection[str],
        target: Any,
        part: MicroBatchPart,
    ) -> ForwardInputs:
        """Before a forward gets these values. Call `kept` after it."""
        overwritten = self._overwritten
        copies = {
            name: v.clone() if overwritten is None or name in overwritten else v
            for name, v in values.items()
        }
        self._given = {name: (v, v._version) for name, v in values.items()}
        nbytes = sum(values[name].nbytes for name in received)
        return ForwardInputs(copies, target, part, nbytes, random_state(self._device))

    def kept(self, found: ForwardInputs) -> None:
        """The forward is done: inputs that it left as they were need no copy."""
        if self._overwritten is None:
            changed = {name for name, (v, before) in self._given.items() if v._version != before}
            self._overwritten = changed
            for name, (v, _) in self._given.items():
                if name not in changed:
                    found.values[name] = v
        self._given = {}

    @contextmanager
    def as_in_first_run(self, found: ForwardInputs) -> Iterator[None]:
        """Random numbers are those of the first run; these and buffers are put back afterwards."""
        random = random_state(self._device)
        buffers = [b.clone() for b in self._buffers]
        set_random_state(found.random, self._device)
        try:
            yield
        finally:
            set_random_state(random, self._device)
            with torch.no_grad():
                for buffer, before in zip(self._buffers, buffers, strict=True):
                    buffer.copy_(before)
