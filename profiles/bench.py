"""Measuring layer by layer: bytes first, exactly; then times, in rounds over all sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .boundary import Inlet
from .errors import TargetError
from .live_bytes import LiveBytes
from .optimizer_cost import measure_optimizer
from .pieces import Piece, cut
from .saved import SavedBytes, storage_bytes, storage_key
from .target import Target
from .trace import TracedModel, state_of_layer, values

Progress = Callable[[str, int, int], None]
"""Called with what is at hand, how much is done and how much there is in all."""

_WARM_UP = 2
_MIN_ROUNDS = 5
_MAX_ROUNDS = 50


class Case:
    """All that belongs to one micro-batch size: inputs at hand, and what was measured."""

    def __init__(self, size: int, inputs: tuple[Tensor, ...], target: Any) -> None:
        self.size = size
        self.inputs = inputs
        self.target = target
        self.values: dict[str, Any] = {}
        self.result: Any = None
        self.storages: dict[int, tuple[str, int]] = {}
        self.saved: list[dict[int, int]] = []
        self.workspace: list[int] = []
        self.forward_s: list[list[float]] = []
        self.backward_s: list[list[float]] = []
        self.whole: list[tuple[float, float]] = []


class Bench:
    """A target on the bench: every layer at every micro-batch size, the sizes in turn."""

    def __init__(
        self,
        target: Target,
        model: nn.Module,
        traced: TracedModel,
        sizes: tuple[int, ...],
        batch_size: int,
    ) -> None:
        self.target = target
        self.model = model
        self.traced = traced
        self.sizes = sizes
        self.batch_size = batch_size
        # Behind the layers, a piece with no layer of its own makes the model's result.
        *self.pieces, self.result = cut(traced, [*([k] for k in range(len(traced.layers))), []])
        self.crossing = values(traced)
        self.names = [layer.name for layer in traced.layers]
        self.cases = [Case(size, *target.sample(size)) for size in sizes]
        self.in_place: list[tuple[int, str]] = []
        self.overhead: list[tuple[float, float]] = []

    def run(self, seconds: float, progress: Progress) -> None:
        """Count bytes, then time in rounds for about so many seconds, 5 rounds at least."""
        for done, case in enumerate(self.cases):
            progress(f"bytes at micro-batch size {case.size}", done, len(self.cases))
            self._connected(case)
            self._workspace(case)
        begin = time.perf_counter()
        rounds = -_WARM_UP
        while True:
            elapsed = time.perf_counter() - begin
            if rounds >= _MAX_ROUNDS or (rounds >= _MIN_ROUNDS and elapsed > seconds):
                break
            for case in self.cases:
                progress(f"round {max(rounds, 0) + 1}", max(rounds, 0), _MAX_ROUNDS)
                self._time_round(case, keep=rounds >= 0)
            rounds += 1
        progress("optimizer", _MAX_ROUNDS, _MAX_ROUNDS)
        make = self.target.task.optimizer if self.target.task else None
        groups = [
            [t for t in state_of_layer(self.traced, layer).values() if isinstance(t, nn.Parameter)]
            for layer in self.traced.layers
        ]
        self.optimizer = measure_optimizer(make, list(self.model.parameters()), groups)

    # Everything but time -----------------------------------------------------------------

    def _connected(self, case: Case) -> None:
        """One forward of the whole model, layer by layer in one graph: who keeps what."""
        state = [*self.model.parameters(), *self.model.buffers()]
        env: dict[str, Any] = dict(
            zip((node.name for node in self.traced.inputs), case.inputs, strict=False)
        )
        inputs = dict(env)
        self.in_place = []
        for k, piece in enumerate((*self.pieces, None)):
            with SavedBytes(ignore=state) as saved:
                if piece is not None:
                    entries = {name: env[name] for name in piece.inputs}
                    before = _versions(entries)
                    out = piece.module(*entries.values())
                    changed = _versions(entries).items() - before.items()
                    self.in_place += [(k, name) for name, _ in sorted(changed)]
                    env.update(zip(piece.outputs, out, strict=True))
                else:
                    case.result = self.result.module(*[env[name] for name in self.result.inputs])[0]
                    if self.target.task is not None:
                        self._check_loss(self.target.task.loss(case.result, case.target))
            case.saved.append(dict(saved.storages))
        for name, value in env.items():
            if isinstance(value, Tensor):
                key = storage_key(value)
                label = f"input:{name}" if name in inputs else name
                case.storages.setdefault(key, (label, storage_bytes(value)))
        case.values = env

    def bound_by_changes(self) -> set[tuple[int, ...]]:
        """Layers that must stay together because one changes in place what the others use.

        On different stages, they would see copies from before and after the change.
        """
        values = self.cases[0].values
        keys = {n: storage_key(v) for n, v in values.items() if isinstance(v, Tensor)}
        groups = set()
        for k, name in self.in_place:
            same = [
                value
                for value in self.crossing
                if keys.get(value.node.name) == keys[name]
                and (value.producer is None or value.producer < k)
            ]
            makers = {value.producer for value in same if value.producer is not None}
            others = {c for value in same for c in value.consumers} - makers - {k}
            if others:
                # Together they share one tensor, their own stage's or one copy of it.
                groups.add(tuple(sorted(c for c in others | {k} if c < len(self.pieces))))
        return {group for group in groups if len(group) > 1}

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TargetError(
                f"{self.target.name}: loss must give one number that depends on the parameters "
                f"(a mean over the samples), not {type(loss).__name__} "
                f"{list(loss.shape) if isinstance(loss, Tensor) else ''}".rstrip()
            )

    def _entries(self, case: Case, names: Sequence[str]) -> list[Any]:
        """Inputs of a layer, cut off from the graph that made them."""
        entries = []
        for name in names:
            value = case.values[name]
            if isinstance(value, Tensor):
                value = Inlet().admit(value.detach()) if value.requires_grad else value.detach()
            entries.append(value)
        return entries

    def _loss_entry(self, case: Case) -> Any:
        return torch.utils._pytree.tree_map(
            lambda v: Inlet().admit(v.detach()) if isinstance(v, Tensor) and v.requires_grad else v,
            case.result,
        )

    def _workspace(self, case: Case) -> None:
        for piece in (*self.pieces, None):
            if piece is None and self.target.task is None:
                continue
            for p in self.model.parameters():
                p.grad = None
            with LiveBytes() as live:
                outs = self._forward(piece, case)
                forward = live.peak - live.live
                grads = [torch.ones_like(out) for out in outs]
                before = live.live - sum(storage_bytes(g) for g in grads)
                live.reset_peak()
                if outs:
                    torch.autograd.backward(outs, grads)
                case.workspace.append(max(forward, live.peak - before if outs else 0, 0))

    def _forward(self, piece: Piece | None, case: Case) -> list[Tensor]:
        """Run a layer (or the loss) on detached inputs; its outputs that take a gradient."""
        if piece is None:
            assert self.target.task is not None
            return [self.target.task.loss(self._loss_entry(case), case.target)]
        out = piece.module(*self._entries(case, piece.inputs))
        leaves = torch.utils._pytree.tree_leaves(out)
        return _distinct([v for v in leaves if isinstance(v, Tensor) and v.requires_grad])

    # Time --------------------------------------------------------------------------------

    def _time_round(self, case: Case, keep: bool) -> None:
        clock = time.perf_counter
        forward_s, backward_s = [], []
        # A whole mini-batch in one micro-batch never adds to a gradient that is there already.
        if case.size == self.batch_size:
            for p in self.model.parameters():
                p.grad = None
        for piece in (*self.pieces, None):
            if piece is None and self.target.task is None:
                continue
            if piece is None:
                entry = self._loss_entry(case)
                task = self.target.task
                assert task is not None
                start = clock()
                out: Any = task.loss(entry, case.target)
                middle = clock()
            else:
                entries = self._entries(case, piece.inputs)
                start = clock()
                out = piece.module(*entries)
                middle = clock()
            leaves = torch.utils._pytree.tree_leaves(out)
            outs = _distinct([v for v in leaves if isinstance(v, Tensor) and v.requires_grad])
            grads = [torch.ones_like(v) for v in outs]
            begin = clock()
            if outs:
                torch.autograd.backward(outs, grads)
            end = clock()
            forward_s.append(middle - start)
            backward_s.append(end - begin if outs else 0.0)
        whole = self._time_whole(case)
        overhead = _time_empty()
        if keep:
            case.forward_s.append(forward_s)
            case.backward_s.append(backward_s)
            case.whole.append(whole)
            self.overhead.append(overhead)

    def _time_whole(self, case: Case) -> tuple[float, float]:
        clock = time.perf_counter
        if case.size == self.batch_size:
            for p in self.model.parameters():
                p.grad = None
        start = clock()
        result = self.traced.module(*case.inputs)
        if self.target.task is not None:
            outs = [self.target.task.loss(result, case.target)]
        else:
            leaves = torch.utils._pytree.tree_leaves(result)
            outs = [v for v in leaves if isinstance(v, Tensor) and v.requires_grad]
        middle = clock()
        grads = [torch.ones_like(v) for v in outs]
        begin = clock()
        torch.autograd.backward(outs, grads)
        return middle - start, clock() - begin


def _versions(entries: dict[str, Any]) -> dict[str, int]:
    """How often each tensor has been changed in place."""
    return {name: value._version for name, value in entries.items() if isinstance(value, Tensor)}


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    """The model's result often is a crossing value too: each tensor once."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _time_empty() -> tuple[float, float]:
    """Seconds of calling an empty GraphModule, and of a backward through nothing."""
    clock = time.perf_counter
    entry = Inlet().admit(torch.zeros(1))
    start = clock()
    out = _EMPTY(entry)
    middle = clock()
    grads = [torch.ones_like(out[0])]
    begin = clock()
    torch.autograd.backward([out[0]], grads)
    return middle - start, clock() - begin


def _empty_module() -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    return torch.fx.GraphModule(nn.Module(), graph)


_EMPTY = _empty_module()
