"""Counting what a stage really holds, operation by operation; the peak is kept by kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...planner.costs.memory import MemoryByKind
from ...planner.plan import Plan
from ...planner.recordings.recording import MEMORY_KINDS
from ...profiles.tasks.hooks import describe_error
from ...profiles.tasks.optimizers import state_bytes
from ...profiles.units import format_bytes
from ..prepare.devices import dense_bytes
from ..prepare.workers import Replica

_LOOKS = 100
"""Moments at which state is looked for elsewhere than in an optimizer's `state`."""


class MemoryAccount:
    """Bytes of one stage, as the runtime holds them.

    Scratch memory inside operations isn't seen, so `workspace_bytes` is 0 here; compare with
    a prediction less its workspace.

    Attributes:
        now: what was held at the last moment that was accounted for, by all stages of the worker.
        peak: the most there was at moments of this stage.
        beside: tell what the worker's other stages hold between their operations, by kind.
        aside_bytes: of gradients that aren't their parameters' own.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], alike: Sequence[Tensor]) -> None:
        """
        Args:
            parameters: that are trained.
            alike: what is the same in all versions: buffers, and other parameters.
        """
        self.parameters = parameters
        self._gradients = 0
        self.aside_bytes = 0
        self._state = self._stated = 0
        # It may be where only the optimizer's own methods look, or there may be none.
        self._looks = _LOOKS
        self._weights = sum(dense_bytes(t) for t in (*parameters, *alike))
        self.peak: MemoryByKind | None = None
        self.now: MemoryByKind | None = None
        self.most_versions = 1
        self.beside: Sequence[Callable[[], tuple[int, ...]]] = ()

    def note(
        self,
        *,
        versions_held: int,
        versions_bytes: int,
        activations_bytes: int,
        boundary_bytes: int,
        optimizer: torch.optim.Optimizer | None,
        gradients_changed: bool = True,
    ) -> None:
        """Account for this moment. `gradients_changed`: since the last time."""
        if gradients_changed:
            found = (p.grad for p in self.parameters)
            self._gradients = sum(dense_bytes(grad) for grad in found if grad is not None)
        self._count_state(optimizer)
        weights, versions, gradients, state, activations, boundary, workspace = self.since(
            versions_bytes, activations_bytes, boundary_bytes
        )
        now = self.now = MemoryByKind(
            weights_bytes=weights,
            versions_bytes=versions,
            gradients_bytes=gradients,
            optimizer_bytes=state,
            activations_bytes=activations,
            boundary_bytes=boundary,
            workspace_bytes=workspace,
        )
        if self.peak is None or now.total > self.peak.total:
            self.peak = now
        self.most_versions = max(self.most_versions, versions_held)

    def since(
        self, versions_bytes: int, activations_bytes: int, boundary_bytes: int
    ) -> tuple[int, ...]:
        """Bytes by kind of all stages of the worker, after the moment last accounted for; they
        don't count for the peak."""
        own = self.own(versions_bytes, activations_bytes, boundary_bytes)
        if not self.beside:
            return own
        return tuple(map(sum, zip(own, *(held() for held in self.beside), strict=True)))

    def own(
        self, versions_bytes: int, activations_bytes: int, boundary_bytes: int = 0
    ) -> tuple[int, ...]:
        """The same of this stage alone."""
        return (
            self._weights,
            versions_bytes,
            self._gradients + self.aside_bytes,
            self._state,
            activations_bytes,
            boundary_bytes,
            0,
        )

    def gradients_gone(self) -> None:
        """The gradients were let go after an update."""
        self._gradients = 0

    def _count_state(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Of a parameter it comes with its first gradient, and doesn't grow after that."""
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
    """One line where an error, or what caused it, is memory that isn't there; None: it is another.

    It says what the worker held, what the plan said, and what to change.

    Args:
        held: bytes by kind when the operation began (`MEMORY_KINDS`); none: nothing has run yet.
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
        kinds = zip(MEMORY_KINDS, held, strict=True)
        names = {"boundary": "messages"}
        by_kind = ", ".join(f"{names.get(k, k)} {format_bytes(n)}" for k, n in kinds if n)
        parts.append(f"the worker held {format_bytes(sum(held))} ({by_kind or 'nothing'})")
    if device.type == "cuda":
        parts.append(_of_gpu(device))
    parts.append(f"its plan has {format_bytes(planned.memory_bytes)} at most{of}")
    more = "have more micro-batches, or recompute activations (--recompute)"
    if sum(held) > _MORE * planned.accounted_memory.total:
        parts.append(
            "it held more than planned: profile again, on this device and with its largest samples"
        )
    elif device.type == "cuda":
        parts.append(f"plan with a --memory that leaves more room, {more}")
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
