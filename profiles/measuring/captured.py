"""A step's layers as CUDA graphs: what they take where a run replays them.

Layer by layer, operation by operation, a GPU waits for the host wherever kernels are short; in a
run's graphs (`--graphs` of tp-run) it doesn't.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from .capture import Capture, Graph
from .step import Phase, Probe

Step = Callable[[Probe, list[Any]], object]
"""Runs a step, and appends what it takes from outside to a list."""


class CapturedStep(Probe):
    """The graphs of one step, in its sequence; they share memory.

    As in a run, gradients are added to those that there are: somebody keeps these.
    """

    def __init__(self, on: Capture, step: Step) -> None:
        """Runs the step as ever, and captures it. Raises what can't be captured raises."""
        self._on, self._pool = on, on.pool()
        self._graphs: list[tuple[int, Phase, Graph]] = []
        self._kept: list[Any] = []
        with on.trying():
            step(Probe(), [])
        # What autograd makes between layers belongs to the stream that is captured, too: no
        # backward may wait for another one.
        with on.aside(), ExitStack() as self._open:
            step(self, self._kept)

    def __len__(self) -> int:
        return len(self._graphs)

    def before(self, k: int, phase: Phase, arriving: Sequence[Tensor]) -> None:
        """Capture begins."""
        graph = self._open.enter_context(self._on.of(self._pool))
        self._graphs.append((k, phase, graph))

    def after(self, k: int, phase: Phase) -> None:
        """It ends."""
        self._open.pop_all().close()

    def replay(self, probe: Probe) -> None:
        """Compute the step; the probe is told as by the step itself, but what arrives."""
        for k, phase, graph in self._graphs:
            probe.before(k, phase, ())
            graph.replay()
            probe.after(k, phase)
