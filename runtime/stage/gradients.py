"""Gradients before an update: all-reduced over replicas, checked for NaN and infinity, clipped by
norm."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, SupportsFloat

import torch
from torch import Tensor, nn

from ...profiles.errors import RunError
from ..communication.all_reduce import ALL_WORKERS, AllReducer, GradientAllReduce, stage_group
from ..prepare.clock import Mark, number
from ..prepare.prepared import Prepared
from ..prepare.tied_parameters import TiedParameters
from ..prepare.workers import Replica
from .optimizer import clip, own_part, squared_norm, total_norm, trained

if TYPE_CHECKING:
    from .notes import OperationNotes
    from .stage import Stage

STOP, WARN, SKIP = "stop", "warn", "skip"


def finite_gradients(parameters: Iterable[nn.Parameter]) -> Callable[[], bool]:
    """Whether all gradients are finite, as one tensor on their device (`finiteness`)."""
    return finiteness([p.grad for p in parameters if p.grad is not None and p.grad.numel()])


class NotFinite:
    """The policy for a loss or gradients that are NaN or infinite (--on-nan), and the mini-batches
    that had them.

    Attributes:
        mini_batches: counted over the whole run, as in the operations' names; ascending.
    """

    def __init__(self, policy: str, *, late: bool = False) -> None:
        """
        Args:
            policy: STOP, WARN or SKIP.
            late: STOP is told when updates may have been made, and nothing of them is saved.
        """
        self.policy = policy
        self._stopped = "anything of it was saved" if late else "the weights took it in"
        self.mini_batches: list[int] = []

    def check_loss(self, mini_batch: int, loss: SupportsFloat) -> None:
        """Raise RunError where the policy says so."""
        value = float(loss)
        if not math.isfinite(value):
            self._found(mini_batch, f"the loss of mini-batch {mini_batch} is {value}")

    def nothing_counts(self, mini_batch: int) -> None:
        """The loss of a mini-batch is 0 / 0. Raise RunError where the policy says so."""
        weights = f"the weights of mini-batch {mini_batch}'s loss sum up to 0"
        self._found(mini_batch, f"{weights}: nothing counts in it, and it has no mean")

    def check_gradients(self, mini_batch: int, finite: Callable[[], bool]) -> bool:
        """Whether they are `finite`. Raise RunError where they aren't and the policy says so."""
        if not finite():
            self._found(mini_batch, f"gradients of mini-batch {mini_batch} aren't finite")
            return False
        return True

    def _found(self, mini_batch: int, what: str) -> None:
        if self.policy == STOP:
            raise RunError(f"{what}: stopped before {self._stopped} (--on-nan)")
        at = bisect_left(self.mini_batches, mini_batch)
        if self.mini_batches[at : at + 1] != [mini_batch]:
            self.mini_batches.insert(at, mini_batch)


def finiteness(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """Whether all numbers of these tensors of one device, none of them empty, are finite.

    Returns what says so when it is asked; the tensors may be changed and let go.
    """
    if not tensors:
        return lambda: True
    dense = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    dense = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in dense]
    if dense[0].is_cuda:
        # Starting a kernel for each tensor takes longer than what it does: the norm has one for
        # many. The greatest number overflows nothing, so this is all there is to read.
        most = number(nn.utils.get_total_norm(dense, math.inf))
        return lambda: math.isfinite(float(most))
    # A sum takes a tenth of the time that looking at each number does. What isn't finite stays
    # so in it; it may also overflow where all is well.
    total = sum([float(t.sum()) for t in dense])
    finite = math.isfinite(total) or all(bool(torch.isfinite(t).all()) for t in dense)
    return lambda: finite


class Completed(NamedTuple):
    """Gradients of an update: summed, looked at and clipped.

    Attributes:
        steps: whether the update is to be made with them.
        losses: of the update's mini-batches, summed over replicas; None: nobody asked.
        check: raises for what isn't finite (`NotFinite.check_gradients`), when it is known.
        summed, checked: when that was done.
    """

    steps: bool
    losses: list[float] | None
    check: Callable[[], bool]
    summed: Mark
    checked: Mark


class StageGradients:
    """All-reduces, checks and clips a stage's gradients when an update is due.

    Attributes:
        norm: of the whole model, before its last clipping; None: there was none.
        not_finite: mini-batches with losses or gradients that weren't.
        asks_losses: those of an update's mini-batches have to be known before it.
    """

    def __init__(
        self,
        prepared: Prepared,
        replica: Replica,
        stage: Stage,
        all_reduce: AllReducer,
        notes: OperationNotes,
    ) -> None:
        self.norm: float | None = None
        self.not_finite = NotFinite(prepared.settings.on_nan, late=notes.clock.late)
        self._notes = notes
        self._prepared = prepared
        self._replica = replica
        self._stage = stage
        self._all_reduce = all_reduce
        self._tied = [tied for tied in prepared.model.ties.copied if replica.stage in tied.stages]
        self._skips = self.not_finite.policy == SKIP
        # A flush's update is left out everywhere or nowhere.
        self._agrees = self._skips and prepared.pipeline.variant.flushes
        self._clips = prepared.settings.clip_norm is not None
        self.asks_losses = self._skips or replica.count > 1

    def leaves_out(self, loss: float) -> bool:
        """Whether `--on-nan skip` leaves a mini-batch with this loss out of the mean loss."""
        return self._skips and not math.isfinite(loss)

    def complete(
        self, mini_batch: int, losses: list[float] | None, *, counts: bool
    ) -> Generator[None, None, Completed]:
        """All-reduce, check and clip the gradients of an update; pause as `StageRunner.steps`.

        Args:
            mini_batch: counted over the run, for messages.
            losses: this replica's parts, where they are asked for.
            counts: whether something counts in each mini-batch.
        """
        mark, many = self._notes.clock.mark, self._replica.count > 1
        shared = torch.tensor(losses, dtype=torch.float64) if many else None
        started = self.start_sums(shared)
        if started or self._agrees or self._clips:
            # In one process, those that reduce over all workers pause as often as the others.
            yield
        for pending in started:
            pending.wait()
        if shared is not None:
            losses = shared.tolist()
        summed = mark()
        gradients = finite_gradients(self._stage.updated)
        check, finite = partial(self.not_finite.check_gradients, mini_batch, gradients), True
        if self._skips or not self._notes.clock.late:
            # What was noted of operations before is known before.
            self._notes.under_way.note()
            finite = check()
        if self._skips:
            # Summed over replicas, so that all of them decide alike.
            finite = finite and counts and all(map(math.isfinite, losses or ()))
        checked = mark()
        if self._agrees:
            bad = torch.tensor([0.0 if finite else 1.0], dtype=torch.float32)
            agreeing = self._all_reduce.start(ALL_WORKERS, [bad])
            yield
            agreeing.wait()
            finite = not float(bad)
        if self._clips:
            yield from self.clip()
        return Completed(finite or not self._skips, losses, check, summed, checked)

    def start_sums(self, losses: Tensor | None) -> list[GradientAllReduce]:
        """Start to sum gradients over whoever has a part of them, and over replicas the losses too.

        Args:
            losses: None: the stage has one replica.
        """
        started = []
        for tied in self._tied:
            copies = tied.of(self._replica.stage, self._stage.piece.module)
            started.append(GradientAllReduce(self._all_reduce, tied.group, copies))
        if losses is not None:
            elsewhere = self._copies(self._tied)
            own = [p for p in self._stage.updated if id(p) not in elsewhere]
            group = stage_group(self._replica.stage)
            started.append(GradientAllReduce(self._all_reduce, group, own, [losses]))
        return started

    def _copies(self, tied: Iterable[TiedParameters]) -> set[int]:
        s = self._replica.stage
        return {id(p) for shared in tied for p in shared.of(s, self._stage.piece.module)}

    def clip(self) -> Iterator[None]:
        """Clip the gradients, which are summed over the stage's replicas; pause as `steps`."""
        most = self._prepared.settings.clip_norm
        assert most is not None
        own = self._stage.updated
        # A parameter with copies on several stages counts once, at the first of them.
        elsewhere = self._copies(t for t in self._tied if t.stages[0] != self._replica.stage)
        counted = [p for p in own if id(p) not in elsewhere]
        if not self._prepared.pipeline.variant.flushes:
            pieces = self._prepared.model.pieces
            every = [p for piece in pieces for p in piece.module.parameters()]
            on_gpu = self._stage.piece.device.type == "cuda"
            norm = total_norm(counted) if on_gpu else math.sqrt(squared_norm(counted))
            clip(own, norm, own_part(most, trained(own), trained(every)))
            return
        squared = torch.tensor([squared_norm(counted)], dtype=torch.float64)
        if not self._replica.leads:
            squared.zero_()
        summing = self._all_reduce.start(ALL_WORKERS, [squared])
        yield
        summing.wait()
        self.norm = math.sqrt(float(squared))
        clip(own, self.norm, most)
