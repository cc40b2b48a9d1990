"""Staleness: how far apart the weights of a mini-batch's forward and backward are.

Older weights aren't kept for this. Up to `SAMPLED` weights of a stage, spread evenly over its
parameters, stand for all of them: distances are exact for smaller stages, estimates for others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsFloat

import torch
from torch import Tensor, nn

from ...planner.systems.hooks import BackwardRun, ForwardRun, StageHooks
from ...planner.systems.operations import Op
from ..prepare.clock import number
from .hooked import HookedStage
from .stash import WeightVersions

SAMPLED = 16_384

_Distance = tuple[SupportsFloat, SupportsFloat]
"""‖W_B − W_F‖ and ‖W_F‖ of a backward."""


@dataclass
class Staleness:
    """Staleness of the backwards of a stretch of training.

    Attributes:
        differences: how often each version difference was seen.
        noted: backwards that ran on other weights than their forwards.
        distance, largest_distance: sum and largest of their ‖W_B − W_F‖ / ‖W_F‖; of a GPU they come
            late, and are read when told to.
        backwards: all of them.
        versions_held: most weight versions held at once.
    """

    differences: dict[int, int] = field(default_factory=dict)
    noted: int = 0
    distance: float = 0.0
    largest_distance: float = 0.0
    backwards: int = 0
    versions_held: int = 1
    _unread: deque[_Distance] = field(default_factory=deque)

    def note(self, difference: int, distance: _Distance | None) -> None:
        """Count a backward. `distance`: None: nothing was to be computed, it is 0."""
        self.differences[difference] = self.differences.get(difference, 0) + 1
        self.backwards += 1
        if distance is not None:
            self.noted += 1
            self._unread.append(distance)

    def read(self, count: int) -> None:
        """Read so many of the distances, which have come by now."""
        while self.noted - len(self._unread) < count:
            moved, norm = map(float, self._unread.popleft())
            distance = moved / norm if norm else 0.0
            self.distance += distance
            self.largest_distance = max(self.largest_distance, distance)


class Sample:
    """The weights that are looked at, of any version of a stage's parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        total = sum(p.numel() for p in parameters)
        self.parameters = parameters
        self._stride = max(1, -(-total // SAMPLED))
        # Where the parameters are, and views of those that are looked at.
        self._at: list[int] = []
        self._views: list[Tensor] = []

    def of(self, tensors: Sequence[Tensor] | None) -> Tensor:
        """``[weights looked at]``. `tensors`: as `WeightVersions.forward` takes them; there may be
        others behind the parameters'."""
        parts = self._latest() if tensors is None else self._parts(tensors)
        found = torch.cat(parts) if parts else torch.zeros(0)
        return found.to(torch.complex128 if found.is_complex() else torch.float64)

    def _parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.detach().reshape(-1)[:: self._stride] for t in tensors[: len(self.parameters)]]

    def _latest(self) -> list[Tensor]:
        at = [p.data_ptr() for p in self.parameters]
        if at != self._at:
            if not all(p.is_contiguous() for p in self.parameters):
                return self._parts(self.parameters)
            self._at, self._views = at, self._parts(self.parameters)
        return self._views


_Together = tuple[int, int | None]
"""A mini-batch, or one of its micro-batches: what has one backward."""


class StalenessMeter(StageHooks):
    """Measures the staleness of a stage's backwards, segment by segment.

    Attributes:
        seen: in the segment at hand.
    """

    def __init__(
        self, weights: WeightVersions, sample: Sample | None, *, by_micro_batch: bool
    ) -> None:
        """
        Args:
            weights: whose versions are counted.
            sample: whose distances are measured; None: only version differences are.
            by_micro_batch: each micro-batch has a backward of its own.
        """
        self.seen = Staleness()
        self._weights, self._sample, self._by_micro_batch = weights, sample, by_micro_batch
        self._used: dict[_Together, int] = {}
        self._predicted: dict[_Together, Tensor] = {}
        self._overwritten: dict[int, Tensor] = {}

    def begin(self, first: int, mini_batches: int) -> None:
        self.seen = Staleness()

    def forward(self, run: ForwardRun) -> None:
        """Note what a forward runs on; the first one counts of those with a backward together."""
        self._hold()
        together, version = self._together(run.op), run.version
        if self._sample is None or together in self._used:
            return
        self._used[together] = version
        # An older version's weights, or those predicted from the latest.
        if run.weights is not None and version == run.latest:
            self._predicted[together] = self._sample.of(run.weights)
        elif run.weights is not None and version not in self._overwritten:
            self._overwritten[version] = self._sample.of(run.weights)

    def backward(self, run: BackwardRun) -> None:
        """Count a backward; of several passes the first, of the first micro-batch: the others may
        have run forward on later weights."""
        if run.first:
            self.seen.note(run.difference, self._distance(run))

    def after_backward(self, op: Op) -> None:
        self._hold()

    def before_update(self) -> None:
        """The latest version is about to be overwritten: look at it if some forward used it."""
        self._hold()
        latest = self._weights.latest
        if self._sample is not None and latest in self._used.values():
            self._looked_at(latest)

    def _distance(self, run: BackwardRun) -> _Distance | None:
        if self._sample is None:
            return None
        together, version = self._together(run.op), run.version
        used, predicted = self._used.pop(together), self._predicted.pop(together, None)
        # Those that were made for the operation, if they aren't any version's.
        made = run.weights if version == run.latest else None
        distance = None
        if made is not None or predicted is not None or used != version:
            before = self._looked_at(used) if predicted is None else predicted
            now = self._looked_at(version) if made is None else self._sample.of(made)
            distance = number(torch.dist(now, before)), number(torch.linalg.vector_norm(before))
        # The latest, too, in case that forwards of the next mini-batches use it as an older one.
        needed = {*self._used.values(), version}
        self._overwritten = {v: w for v, w in self._overwritten.items() if v in needed}
        return distance

    def _looked_at(self, version: int) -> Tensor:
        assert self._sample is not None
        found = self._overwritten.get(version)
        if found is None:
            # Until the next update they stay as they are.
            found = self._overwritten[version] = self._sample.of(None)
        return found

    def _hold(self) -> None:
        self.seen.versions_held = max(self.seen.versions_held, self._weights.held)

    def _together(self, op: Op) -> _Together:
        return op.mini_batch, op.micro_batch if self._by_micro_batch else None


def meter_of(stage: HookedStage) -> StalenessMeter:
    """That of a stage."""
    parameters = [*stage.weights.parameters, *stage.ties.parameters]
    sample = Sample(parameters) if stage.settings.distances else None
    by_micro_batch = stage.variant.backward_unit == "micro"
    return StalenessMeter(stage.weights, sample, by_micro_batch=by_micro_batch)
