"""The runtime's account of a stage's bytes, by kind, operation by operation; its peak."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ...planner.costs.memory import MemoryByKind
from ...planner.plan import Plan
from ...planner.recordings.recording import ACCOUNTED_KINDS
from ...planner.systems.hooks import HookChain
from ...profiles.tasks.hooks import describe_error
from ...profiles.tasks.optimizers import state_bytes
from ...profiles.units import format_bytes
from ..prepare.devices import dense_bytes
from ..prepare.workers import Replica
from ..weights.stash import WeightVersions

_FIELDS = tuple(f"{kind}_bytes" for kind in ACCOUNTED_KINDS)

_LOOKS = 100
"""Moments at which state is looked for elsewhere than in an optimizer's `state`."""


class MemoryAccount:
    """Bytes that one stage holds, by kind, and their peak.

    Scratch memory inside operations isn't seen, so `workspace_bytes` is 0 here; compare with
    a prediction less its workspace.

    Attributes:
        last: what was held at the last moment that was accounted for, by all stages of the worker,
            by kind (`ACCOUNTED_KINDS`); None: there was none.
        peak: the most there was at moments of this stage.
        activations_bytes: that are kept for backwards to come.
        aside_bytes: of gradients that aren't their parameters' own.
        beside: what the worker's other stages hold between their operations, by kind.
    """

    def __init__(
        self,
        weights: WeightVersions,
        alike: Iterable[Tensor] = (),
        hooks: HookChain | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """
        Args:
            weights: those that are trained.
            alike: what is the same in all versions: buffers, and other parameters.
            hooks: what they keep counts with the versions.
        """
        self._versions, self._hooks, self._optimizer = weights, hooks or HookChain(()), optimizer
        self._gradient_bytes = [(p, dense_bytes(p)) for p in weights.parameters]
        self._weights = sum(dense_bytes(t) for t in (*weights.parameters, *alike))
        self._gradients = self._state = self._stated = 0
        # It may be where only the optimizer's own methods look, or there may be none.
        self._looks = _LOOKS
        self.activations_bytes = self.aside_bytes = 0
        self.last: tuple[int, ...] | None = None
        self.peak: MemoryByKind | None = None
        self._most = 0
        self.beside: Sequence[Callable[[], tuple[int, ...]]] = ()

    def note(self, boundary_bytes: int = 0, *, gradients_changed: bool = True) -> None:
        """Account for this moment.

        Args:
            boundary_bytes: what the channels hold.
            gradients_changed: since the last time.
        """
        if gradients_changed:
            self._gradients = sum([n for p, n in self._gradient_bytes if p.grad is not None])
        self._count_state()
        self.last = held = self.held(boundary_bytes)
        total = sum(held)
        if total > self._most or self.peak is None:
            self._most = total
            self.peak = MemoryByKind(**dict(zip(_FIELDS, held, strict=True)))

    def held(self, boundary_bytes: int) -> tuple[int, ...]:
        """Bytes that all stages of the worker hold now, by kind (`ACCOUNTED_KINDS`), with what was
        seen of gradients and states at the moment last accounted for."""
        own = self.own(boundary_bytes)
        if not self.beside:
            return own
        return tuple(map(sum, zip(own, *(held() for held in self.beside), strict=True)))

    def own(self, boundary_bytes: int = 0) -> tuple[int, ...]:
        """The same of this stage alone."""
        kept = self._hooks.states()
        beside = sum([dense_bytes(t) for _, by in kept for t in by.values()]) if kept else 0
        return (
            self._weights,
            self._versions.older_bytes + beside,
            self._gradients + self.aside_bytes,
            self._state,
            self.activations_bytes,
            boundary_bytes,
            0,
        )

    def gradients_gone(self, left_bytes: int = 0) -> None:
        """The gradients were let go after an update, but for memory that they have again."""
        self._gradients = left_bytes

    def _count_state(self) -> None:
        """Of a parameter it comes with its first gradient, and doesn't grow after that."""
        optimizer = self._optimizer
        if optimizer is None or not (optimizer.state or self._looks):
            return
        if not self._state or len(optimizer.state) != self._stated:
            self._looks = max(self._looks - 1, 0)
            self._stated = len(optimizer.state)
            self._state = state_bytes(optimizer)


# A worker that runs out of memory ---------------------------------------------------------------

_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|CU\w+_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_WANTED = re.compile(r"tried to allocate ([\d.]+) *([a-z]+)", re.IGNORECASE)


def out_of_memory(
    error: BaseException,
    plan: Plan,
    replica: Replica,
    device: torch.device,
    held: Sequence[int] = (),
) -> str | None:
    """One line for an error that is, or follows from, memory running out; None: it is another
    error.

    It says what the worker held, what the plan said, and what to change.

    Args:
        held: bytes by kind when the operation began (`ACCOUNTED_KINDS`); none: nothing has run yet.
    """
    text = _no_memory(error)
    if text is None:
        return None
    found = _WANTED.search(text)
    wanted = ""
    if found is not None:
        amount, unit = found.groups()
        size = format_bytes(int(amount)) if unit == "bytes" else f"{amount} {unit}"
        wanted = f" ({size} more were asked for)"
    planned = plan.predicted.device_of(replica.stage)
    spec = plan.cluster.devices[plan.stages[replica.stage].devices[replica.index]]
    of = "" if spec.memory_bytes is None else f" of {format_bytes(spec.memory_bytes)} (--memory)"
    parts = [f"out of memory on {device}{wanted}"]
    if held:
        kinds = zip(ACCOUNTED_KINDS, held, strict=True)
        names = {"boundary": "messages"}
        by_kind = ", ".join(f"{names.get(k, k)} {format_bytes(n)}" for k, n in kinds if n)
        parts.append(f"the worker held {format_bytes(sum(held))} ({by_kind or 'nothing'})")
    if device.type == "cuda":
        parts.append(_of_gpu(device))
    parts.append(f"its plan has {format_bytes(planned.memory_bytes)} at most{of}")
    more = "have more micro-batches, or recompute activations (--recompute)"
    without = "run with --graphs off, as no plan counts what CUDA graphs hold"
    if sum(held) > _MORE * planned.accounted_memory.total:
        again = "profile again, on this device and with its largest samples"
        mend = f"{without}; or {again}" if device.type == "cuda" else again
        parts.append(f"it held more than planned: {mend}")
    elif device.type == "cuda":
        parts.append(f"plan with a --memory that leaves more room, {more}; or {without}")
    else:
        parts.append(f"plan with a --memory that this machine has for each of its workers, {more}")
    return "; ".join(parts)


_MORE = 1.02
"""A run holds what is planned within 1.5 %."""


def _no_memory(error: BaseException | None) -> str | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # The user's own may have none that can be had.
        text = describe_error(error)
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return text
        if isinstance(error, RuntimeError) and _NO_MEMORY.search(text):
            return text
        error = error.__cause__
    return None


def _of_gpu(device: torch.device) -> str:
    own = torch.cuda.memory_reserved(device)
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:
        return f"torch had reserved {format_bytes(own)}"
    others = format_bytes(total - free - own)
    return (
        f"torch had reserved {format_bytes(own)} here, and of the GPU's {format_bytes(total)} "
        f"CUDA itself and other processes had {others}"
    )
