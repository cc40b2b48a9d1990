"""Deferred batch normalisation: running statistics of whole mini-batches, as torchgpipe has them.

A micro-batch is normalized by its own statistics. Deferred, the running statistics (those of
evaluation) are those that whole mini-batches have, updated once for each; as in torchgpipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from ...planner.systems.hooks import ForwardRun, StageHooks
from ...planner.systems.operations import Op
from ...profiles.autograd.dropout import BATCH_NORMS
from ...profiles.tracing.graph import GraphBody, fetch_attribute, graph_of
from ..weights.hooked import HookedStage

_MOMENTUM = 0.1
"""Of torch.nn.functional.batch_norm, where it isn't given."""

_NORMS = {nn.modules.batchnorm._BatchNorm.forward, nn.modules.instancenorm._InstanceNorm.forward}
"""Forwards that only update their running statistics, in training mode."""

BatchNormCall = Mapping[str, Any]
"""A batch norm's arguments by name."""


class _WithoutUpdates(TorchFunctionMode):
    """Under it batch norms leave their running statistics alone, and are noted instead."""

    def __init__(self, note: Callable[[BatchNormCall], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        names = BATCH_NORMS.get(func)
        kwargs = kwargs or {}
        if names is not None:
            call = {**dict(zip(names, args, strict=False)), **kwargs}
            if call.get("training") and call.get("running_mean") is not None:
                self._note(call)
                return func(**{**call, "running_mean": None, "running_var": None})
        return func(*args, **kwargs)


@dataclass
class _Statistics:
    """Statistics of one batch norm over the micro-batches of a mini-batch that were seen."""

    running_mean: Tensor
    running_var: Tensor
    momentum: float
    mean: Tensor
    squares: Tensor
    count: int = 0

    def add(self, values: Tensor) -> None:
        """Add values ``[samples, channels, ...]``; a mean and the squares about it are kept."""
        columns = values.transpose(0, 1).flatten(1)
        count = columns.shape[1]
        if not count:
            return
        mean = columns.mean(1)
        squares = (columns - mean[:, None]).square().sum(1)
        apart = mean - self.mean
        total = self.count + count
        self.squares += squares + apart.square() * (self.count * count / total)
        self.mean += apart * (count / total)
        self.count = total

    def settle(self) -> None:
        """Move the running statistics once, as a batch norm of all values would."""
        if self.count < 2:
            return
        variance = self.squares / (self.count - 1)
        for running, found in ((self.running_mean, self.mean), (self.running_var, variance)):
            running.lerp_(found.to(running.dtype), self.momentum)


class DeferredBatchNorm(StageHooks):
    """Running statistics of a stage's batch norms, updated once for each mini-batch."""

    def __init__(self, module: nn.Module) -> None:
        self._counters = [
            buffer
            for name, buffer in module.named_buffers()
            if name.endswith("num_batches_tracked")
        ]
        # With momentum=None each mini-batch counts as much as every other: the share of one is only
        # known when those before it are settled.
        self._averages = {
            id(norm.running_mean): norm.num_batches_tracked
            for norm in module.modules()
            if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.momentum is None
        }
        self._found: dict[int, dict[int, _Statistics]] = {}
        self._counted: dict[int, list[Tensor]] = {}

    def forward(self, run: ForwardRun) -> AbstractContextManager[None]:
        """The context of a forward's first run."""
        return self.noting(run.op.mini_batch, run.real, run.size)

    @contextmanager
    def noting(self, mini_batch: int, real: int, size: int) -> Iterator[None]:
        """Note the statistics of a micro-batch, and leave the running ones as they are.

        Args:
            real: its own samples, in front.
            size: samples with padding.
        """
        found = self._found.setdefault(mini_batch, {})
        before = [counter.clone() for counter in self._counters]

        @torch.no_grad()
        def note(call: BatchNormCall) -> None:
            values: Tensor = call["input"].detach()
            # A whole number of rows for each sample, or the padding counts with the rest.
            if values.shape[0] % size == 0:
                values = values[: values.shape[0] // size * real]
            if values.dtype in (torch.float16, torch.bfloat16):
                values = values.float()
            running = call["running_mean"]
            statistics = found.get(id(running))
            if statistics is None:
                zeros = torch.zeros_like(running, dtype=values.dtype)
                statistics = found[id(running)] = _Statistics(
                    running,
                    call["running_var"],
                    call.get("momentum", _MOMENTUM),
                    zeros,
                    zeros.clone(),
                )
            statistics.add(values)

        with _WithoutUpdates(note):
            yield
        # Frozen ones, in evaluation mode, count nothing.
        after = [counter.clone() for counter in self._counters]
        self._counted[mini_batch] = [b - a for a, b in zip(before, after, strict=True)]
        for counter, value in zip(self._counters, before, strict=True):
            counter.copy_(value)

    def recompute(self, op: Op) -> AbstractContextManager[Any]:
        """The context of layers' second run: batch norms keep for the backward what they kept in
        the first, and nothing is noted twice."""
        return _WithoutUpdates(lambda call: None)

    def due(self, mini_batch: int) -> None:
        """All forwards of the mini-batch are done, and of those before: update once for each."""
        for done in sorted(b for b in self._found if b <= mini_batch):
            for counter, change in zip(self._counters, self._counted.pop(done), strict=True):
                counter.add_(change)
            for key, statistics in self._found.pop(done).items():
                if (batches := self._averages.get(key)) is not None:
                    statistics.momentum = 1 / max(int(batches), 1)
                statistics.settle()


def deferred_of(stage: HookedStage) -> DeferredBatchNorm | None:
    """A stage's deferred batch norm, where it is asked for."""
    return DeferredBatchNorm(stage.module) if stage.settings.deferred_batch_norm else None


def only_updated(module: GraphBody) -> set[int]:
    """Ids of the running statistics that a stage's forward, in training mode, doesn't read."""
    updated, read = set[int](), set[int]()
    for node in graph_of(module).nodes:
        if node.op == "call_module":
            for one in fetch_attribute(module, str(node.target)).modules():
                norm = type(one).forward in _NORMS and one.training
                (updated if norm else read).update(map(id, one.buffers(recurse=False)))
        elif node.op == "get_attr":
            alone = all(_updated_alone(user, node) for user in node.users)
            (updated if alone else read).add(id(fetch_attribute(module, str(node.target))))
    return updated - read


def _updated_alone(node: fx.Node, buffer: fx.Node) -> bool:
    """Whether a node of a graph is a batch norm in training mode that only updates this buffer, its
    running statistics, or counts in it."""
    if node.target is torch.ops.aten.add_.Tensor:
        # Of torch.export's graphs: num_batches_tracked.
        return not node.users and node.args[0] is buffer and buffer not in node.args[1:]
    names = BATCH_NORMS.get(node.target)
    if names is None:
        return False
    call = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    others = [value for name, value in call.items() if not name.startswith("running_")]
    return call.get("training") is True and buffer not in others
