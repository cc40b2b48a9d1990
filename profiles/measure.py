"""Measuring a target: layer by layer, at several micro-batch sizes → a Profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from .boundary import Inlet
from .errors import TargetError, TraceError
from .live_bytes import LiveBytes
from .optimizer_cost import measure_optimizer
from .pieces import Piece, cut, encode
from .profile import (
    Edge,
    Layer,
    Measurement,
    ModelInput,
    Profile,
    Storage,
    Totals,
    check_profile,
)
from .saved import SavedBytes, storage_bytes, storage_key
from .target import Target, describe_error
from .trace import OUTPUT, TracedModel, fingerprint, state_of_layer, tied_layers, trace, values

Progress = Callable[[str, int, int], None]
"""Called with what is at hand, how much is done and how much there is in all."""

_WARM_UP = 2
_MIN_ROUNDS = 5
_MAX_ROUNDS = 50


def default_sizes(batch_size: int) -> tuple[int, ...]:
    """Micro-batch sizes to measure: the mini-batch and its halves down to a sixteenth."""
    sizes = {batch_size}
    size = batch_size
    while size % 2 == 0 and len(sizes) < 5:
        size //= 2
        sizes.add(size)
    return tuple(sorted(sizes))


def measure(
    target: Target,
    *,
    batch_size: int = 64,
    micro_batch_sizes: Sequence[int] | None = None,
    threads: int = 1,
    seconds: float = 8.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """Profile a target on the CPU in train mode.

    Args:
        batch_size: samples in a mini-batch.
        micro_batch_sizes: sizes to measure; by default the mini-batch and its halves.
        threads: torch's threads while measuring; a stage will run with as many.
        seconds: time to spend on timing. At least 5 rounds are made, at most 50.
        seed: for the model's initial weights.

    Raises:
        TargetError: the model can't be built, or fails on its own inputs.
        TraceError: the model can't be traced.
    """
    sizes = tuple(sorted(set(micro_batch_sizes or default_sizes(batch_size))))
    torch.set_num_threads(threads)
    model = target.model(seed)
    model.train()
    if not any(p.requires_grad for p in model.parameters()):
        raise TargetError(f"{target.name}: the model has no parameter to train")
    traced = trace(model, target.name)
    if len(traced.inputs) < len(target.sample(1)[0]):
        raise TargetError(
            f"{target.name}: the data gives {len(target.sample(1)[0])} inputs, but the model's "
            f"forward takes {len(traced.inputs)}"
        )
    bench = _Bench(target, model, traced, sizes, batch_size)
    try:
        bench.run(seconds, progress or (lambda *_: None))
    except (TargetError, TraceError):
        raise
    except Exception as error:  # the user's model and loss run here
        raise TargetError(
            f"{target.name}: the model failed on its own inputs: {describe_error(error)}"
        ) from error
    return check_profile(bench.profile(threads))


class _Case:
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


class _Bench:
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
        self.cases = [_Case(size, *target.sample(size)) for size in sizes]
        # A whole mini-batch in one micro-batch never adds to a gradient that is there already.
        self.overhead: list[tuple[float, float]] = []

    # Everything but time -----------------------------------------------------------------

    def run(self, seconds: float, progress: Progress) -> None:
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

    def _connected(self, case: _Case) -> None:
        """One forward of the whole model, layer by layer in one graph: who keeps what."""
        state = [*self.model.parameters(), *self.model.buffers()]
        env: dict[str, Any] = dict(
            zip((node.name for node in self.traced.inputs), case.inputs, strict=False)
        )
        inputs = dict(env)
        for piece in (*self.pieces, None):
            with SavedBytes(ignore=state) as saved:
                if piece is not None:
                    out = piece.module(*[env[name] for name in piece.inputs])
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

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TargetError(
                f"{self.target.name}: loss must give one number that depends on the parameters "
                f"(a mean over the samples), not {type(loss).__name__} "
                f"{list(loss.shape) if isinstance(loss, Tensor) else ''}".rstrip()
            )

    def _entries(self, case: _Case, names: Sequence[str]) -> list[Any]:
        """Inputs of a layer, cut off from the graph that made them."""
        entries = []
        for name in names:
            value = case.values[name]
            if isinstance(value, Tensor):
                value = Inlet().admit(value.detach()) if value.requires_grad else value.detach()
            entries.append(value)
        return entries

    def _loss_entry(self, case: _Case) -> Any:
        return torch.utils._pytree.tree_map(
            lambda v: Inlet().admit(v.detach()) if isinstance(v, Tensor) and v.requires_grad else v,
            case.result,
        )

    def _workspace(self, case: _Case) -> None:
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

    def _forward(self, piece: Piece | None, case: _Case) -> list[Tensor]:
        """Run a layer (or the loss) on detached inputs; its outputs that take a gradient."""
        if piece is None:
            assert self.target.task is not None
            return [self.target.task.loss(self._loss_entry(case), case.target)]
        out = piece.module(*self._entries(case, piece.inputs))
        leaves = torch.utils._pytree.tree_leaves(out)
        return _distinct([v for v in leaves if isinstance(v, Tensor) and v.requires_grad])

    # Time --------------------------------------------------------------------------------

    def _time_round(self, case: _Case, keep: bool) -> None:
        clock = time.perf_counter
        forward_s, backward_s = [], []
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

    def _time_whole(self, case: _Case) -> tuple[float, float]:
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

    # The result --------------------------------------------------------------------------

    def profile(self, threads: int) -> Profile:
        tied = tied_layers(self.traced)
        parameter = next(self.model.parameters())
        return Profile(
            target=self.target.name,
            fingerprint=fingerprint(self.traced),
            device="cpu",
            threads=threads,
            dtype=str(parameter.dtype).removeprefix("torch."),
            torch_version=torch.__version__.split("+")[0],
            batch_size=self.batch_size,
            micro_batch_sizes=self.sizes,
            inputs=self._inputs(),
            layers=self._layers(),
            edges=self._edges(),
            storages=self._storages(),
            tied=tuple(tuple(self.names[k] for k in group) for group in tied),
            loss=self._measurements(len(self.pieces)) if self.target.task else (),
            optimizer=self.optimizer,
            whole_model=tuple(
                Totals(
                    micro_batch=case.size,
                    forward_s=_rounded(median(f for f, _ in case.whole)),
                    backward_s=_rounded(median(b for _, b in case.whole)),
                    saved_bytes=sum({k: v for s in case.saved for k, v in s.items()}.values()),
                )
                for case in self.cases
            ),
        )

    def _measurements(self, k: int) -> tuple[Measurement, ...]:
        # What it costs to call an empty piece isn't the layer's own.
        call_s = median(f for f, _ in self.overhead)
        engine_s = median(b for _, b in self.overhead)
        return tuple(
            Measurement(
                micro_batch=case.size,
                forward_s=_rounded(max(median(r[k] for r in case.forward_s) - call_s, 0.0)),
                backward_s=_rounded(max(median(r[k] for r in case.backward_s) - engine_s, 0.0)),
                saved_bytes=sum(case.saved[k].values()),
                workspace_bytes=case.workspace[k],
            )
            for case in self.cases
        )

    def _layers(self) -> tuple[Layer, ...]:
        seen: set[int] = set()
        shared = self._shared()
        layers = []
        for k, nodes in enumerate(self.traced.layers):
            sizes = {"parameter": 0, "buffer": 0}
            for tensor in state_of_layer(self.traced, nodes).values():
                # Tied tensors count once, where they are used first.
                if isinstance(tensor, Tensor) and storage_key(tensor) not in seen:
                    seen.add(storage_key(tensor))
                    what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                    sizes[what] += tensor.numel() * tensor.element_size()
            case = self.cases[-1]
            layers.append(
                Layer(
                    name=nodes.name,
                    kind=nodes.kind,
                    parameter_bytes=sizes["parameter"],
                    buffer_bytes=sizes["buffer"],
                    saves=tuple(
                        sorted(
                            case.storages[key][0]
                            for key in case.saved[k]
                            if key in case.storages and case.storages[key][0] in shared
                        )
                    ),
                    measurements=self._measurements(k),
                )
            )
        return tuple(layers)

    def _shared(self) -> set[str]:
        """Names of the storages that go between layers."""
        return {label for label, _ in self.cases[-1].storages.values()}

    def _storages(self) -> tuple[Storage, ...]:
        by_case = [
            {**dict(case.storages.values()), **self._number_bytes(case)} for case in self.cases
        ]
        return tuple(
            Storage(
                name=label,
                **_affine(self.sizes, [sizes.get(label, 0) for sizes in by_case]),
            )
            for label in by_case[-1]
        )

    def _number_bytes(self, case: _Case) -> dict[str, int]:
        """Numbers and sizes between layers travel as int64 tensors."""
        return {
            value.node.name: storage_bytes(encode(found, value.node.name))
            for value in self.crossing
            if value.producer is not None
            and not isinstance(found := case.values[value.node.name], Tensor)
        }

    def _edges(self) -> tuple[Edge, ...]:
        edges = []
        for value in self.crossing:
            if value.producer is None:
                continue
            name = value.node.name
            found = [case.values[name] for case in self.cases]
            last = found[-1]
            if isinstance(last, Tensor):
                storage = self.cases[-1].storages[storage_key(last)][0]
                sizes = [v.numel() * v.element_size() for v in found]
            else:
                storage = name
                sizes = [self._number_bytes(case)[name] for case in self.cases]
            for consumer in value.consumers:
                edges.append(
                    Edge(
                        producer=self.names[value.producer],
                        consumer=self.names[consumer] if consumer < len(self.names) else OUTPUT,
                        tensor=name,
                        storage=storage,
                        needs_grad=isinstance(last, Tensor) and last.requires_grad,
                        **_affine(self.sizes, sizes),
                    )
                )
        return tuple(edges)

    def _inputs(self) -> tuple[ModelInput, ...]:
        used = {value.node: value.consumers for value in self.crossing if value.producer is None}
        return tuple(
            ModelInput(
                name=node.name,
                shape=tuple(tensor.shape[1:]),
                dtype=str(tensor.dtype).removeprefix("torch."),
                consumers=tuple(
                    self.names[k] if k < len(self.names) else OUTPUT for k in used.get(node, ())
                ),
            )
            for node, tensor in zip(self.traced.inputs, self.cases[-1].inputs, strict=False)
        )


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


def _affine(sizes: Sequence[int], found: Sequence[int]) -> dict[str, Any]:
    """Fit ``fixed + per_sample * m`` through the smallest and the largest micro-batch."""
    if len(sizes) == 1:
        return {"bytes_per_sample": found[0] / sizes[0], "fixed_bytes": 0}
    slope = max((found[-1] - found[0]) / (sizes[-1] - sizes[0]), 0.0)
    return {"bytes_per_sample": slope, "fixed_bytes": max(round(found[0] - slope * sizes[0]), 0)}


def _rounded(seconds: float) -> float:
    """Nanoseconds are enough, and make files that people can read."""
    return round(seconds, 9)
