"""Measuring every layer at every micro-batch size: bytes first, then times until they are sure."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..autograd.boundary import Inlet, storage_bytes
from ..autograd.split_backward import SplitBackward
from ..errors import TaskWarning
from ..target import Target
from ..tracing.graph import GraphBody
from . import capture
from .platforms import Clock, CudaMeter, LiveBytes, Platform, Reserved
from .saved_bytes import MicroBatchCase, count_saved
from .step import CapturedStep, Partly, Phase, PiecewiseStep, Probe, roots_of

# How sure a time is, and when to stop measuring -------------------------------------------------

HEAVY_SHARE = 0.01
"""Layers with less of the step's time than this needn't be known well."""

# Of a normal distribution: deviation over median absolute deviation, and the median's
# standard error over the mean's (Kendall and Stuart, The Advanced Theory of Statistics).
_DEVIATION_OVER_MAD = 1.4826
_MEDIAN_OVER_MEAN = 1.2533


def relative_error(times: Sequence[float]) -> float:
    """Standard error of the median of repeated times, over the median.

    The spread is taken from the median absolute deviation, so that a few times when the
    machine was busy elsewhere don't count as doubt. One time alone is as unsure as can be: 1.
    """
    middle = median(times)
    if middle <= 0:
        return 0.0
    if len(times) < 2:
        return 1.0
    mad = median(abs(t - middle) for t in times)
    return float(_MEDIAN_OVER_MEAN * _DEVIATION_OVER_MAD * mad / len(times) ** 0.5 / middle)


def worst_error(layers: Sequence[Sequence[float]]) -> float:
    """Largest relative error among the layers, of each its repeated times, that make up most of the
    time."""
    middles = [median(times) for times in layers]
    total = sum(middles)
    heavy = [t for t, m in zip(layers, middles, strict=True) if m >= HEAVY_SHARE * total]
    return max((relative_error(times) for times in heavy), default=0.0)


# The bench --------------------------------------------------------------------------------------

Progress = Callable[[str, float, float], None]
"""Called with what is at hand, and how many seconds are over of how many in all; 0 of 0 where that
isn't known."""

_LONG_ROUND_S = 2.0
"""Of rounds that take longer, fewer are made."""
_MIN_ROUNDS, _MIN_LONG_ROUNDS, _MIN_HASTY_ROUNDS = 5, 3, 2
_MAX_ROUNDS = 200
_EMPTY_CALLS = 24
"""Calls of an empty piece in one step, spread over its layers."""


class Bench:
    """Measures a target; `profile_builder` makes a profile of what is found here.

    Attributes:
        bound: layers, by position, that stay together for what some do with values that others
            take.
        by_values: those that do for the shapes between them (`bound_by_values`).
    """

    def __init__(
        self,
        target: Target,
        model: nn.Module,
        platform: Platform,
        cases: Sequence[MicroBatchCase],
        batch_size: int,
        progress: Progress,
    ) -> None:
        self.target = target
        self.model = model
        self.platform = platform
        self.cases = list(cases)
        self.batch_size = batch_size
        self.progress = progress
        self.traced = self.cases[-1].traced
        self.sizes = tuple(case.size for case in cases)
        self.names = [layer.name for layer in self.traced.layers]
        self.bound: set[tuple[int, ...]] = set()
        self.by_values: set[tuple[int, ...]] = set()
        self.reserved: Reserved | None = None
        # Of gradients, which graphs add to.
        self._sums: list[Tensor | None] = []
        self._turn = False
        self._begin_and_end: tuple[float, float] | None = None

    @property
    def parts(self) -> list[str]:
        """Names of what is measured: the layers, and the loss where there is one."""
        return [*self.names, *(["loss"] if self.target.task else [])]

    def count(self) -> None:
        """Count what every layer keeps; what else is measured takes that."""
        for case in self.cases:
            case.saved = count_saved(case, self.model, self.target, self.platform)
        first = self.cases[0]
        self.bound = first.saved.bound(first.values, len(self.names))

    def run(self, seconds: float, error: float) -> None:
        """Count the other bytes; then time in rounds until times are sure, or the seconds are
        over."""
        with self.platform.clock() as clock:
            for case in self.cases:
                self._count_workspace(case)
            if not self.platform.computed:
                self._capture()
                self._time(clock, seconds, error)
                self._forget_graphs()
                self._forget_gradients()
                self._report("memory of a step")
                largest = self.cases[-1]
                self.reserved = self.platform.reserved(lambda: self._time_whole(largest, clock))
                self._forget_gradients()
                return
            # Computed times are the same every time.
            self._round(clock, keep=True)
            for case in self.cases:
                self._time_halves(case, clock)

    def _report(self, what: str) -> None:
        now = time.perf_counter()
        begin, end = self._begin_and_end or (now, now)
        # Of a round that takes longer than those before nothing is known.
        self.progress(what, *((now - begin, end - begin) if now < end else (0, 0)))

    def _capture(self) -> None:
        """Capture what is timed, where a run captures its stages. All of it or nothing: sizes are
        compared."""
        on = capture.capture_on(self.platform.device)
        if on is None or self.target.task is None:
            return
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        self._sums = [p.grad for p in self.model.parameters()]
        # Where a pass of before is still there, so are the nodes at which gradients come to
        # parameters, and a captured backward would wait for the stream of these.
        gc.collect()
        try:
            for case in self.cases:
                case.captured = tuple(
                    CapturedStep(on, partial(run, case))
                    for run in (self._run_layers, self._run_halves, self._run_whole)
                )
        except Exception as error:  # torch's, of whatever kind
            self._forget_graphs()
            warnings.warn(
                "layers are timed operation by operation, since CUDA graphs of them can't be had: "
                f"{capture.reason(error)}",
                TaskWarning,
                stacklevel=2,
            )
        self._forget_gradients()

    def _forget_graphs(self) -> None:
        self._sums = []
        for case in self.cases:
            case.captured = None

    def _run_layers(self, case: MicroBatchCase, probe: Probe, partly: Partly | None = None) -> None:
        """Run a step layer by layer."""
        names = (node.name for node in case.traced.inputs)
        step = PiecewiseStep(
            case.pieces,
            case.result,
            dict(zip(names, (t.clone() for t in case.inputs), strict=False)),
            lambda result: roots_of(self.target, result, case.target),
            self.target.task is not None,
        )
        step.run(self.platform.forward_context(), probe, partly)

    def _begin(self, case: MicroBatchCase) -> None:
        """Forget gradients where a step of this size is to find none: a mini-batch in one
        micro-batch never adds to any, and computed times leave that out at every size."""
        if case.size == self.batch_size or self.platform.computed:
            self._forget_gradients()

    def _forget_gradients(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    # Bytes -------------------------------------------------------------------------------

    def _count_workspace(self, case: MicroBatchCase) -> None:
        self._forget_gradients()
        case.workspace = [0] * len(self.parts)
        with self.platform.meter() as meter:
            say = f"bytes at micro-batch size {case.size}"
            self._run_layers(case, _WorkspaceProbe(self, case, meter, say))
        self._forget_gradients()

    def _run_halves(self, case: MicroBatchCase, probe: Probe) -> None:
        """Run a step whose backwards go to the layers' inputs alone; then their rest. Count what is
        kept between them."""
        halves: dict[int, SplitBackward] = {}

        def partly(
            k: int, edges: Sequence[GradientEdge], grads: Sequence[Tensor], inlets: Sequence[Inlet]
        ) -> None:
            halves[k] = SplitBackward(edges, grads, inlets, case.pieces[k].module.parameters())
            halves[k].inputs()

        self._run_layers(case, probe, partly)
        case.postponed = [0] * len(self.parts)
        for k, half in halves.items():
            case.postponed[k] = half.held_bytes
        # When all layers' first parts are through: the caches have forgotten what both need.
        for k in list(halves):
            probe.before(k, "W", ())
            halves.pop(k).weights()
            probe.after(k, "W")

    def _run_whole(self, case: MicroBatchCase, probe: Probe) -> None:
        """Run a step of the model in one piece, as layer 0."""
        inputs = [tensor.clone() for tensor in case.inputs]
        probe.keep(inputs)
        with self.platform.forward_context():
            probe.before(0, "F", ())
            roots = roots_of(self.target, case.traced.module(*inputs), case.target)
            probe.after(0, "F")
        probe.before(0, "B", ())
        torch.autograd.backward(roots, [torch.ones_like(v) for v in roots])
        probe.after(0, "B")

    # Time --------------------------------------------------------------------------------

    def _time(self, clock: Clock, seconds: float, error: float) -> None:
        begin = time.perf_counter()
        self._round(clock, keep=False)
        long = time.perf_counter() - begin > _LONG_ROUND_S
        if seconds and not long:
            self._round(clock, keep=False)
        warm = time.perf_counter()
        least = _MIN_LONG_ROUNDS if long else _MIN_ROUNDS
        if not seconds:
            # Whoever gives no time wants the bytes.
            least = _MIN_HASTY_ROUNDS
        for k in range(_MAX_ROUNDS):
            now = time.perf_counter()
            if k >= least and (now - begin > seconds or self.worst_error() <= error):
                break
            # The seconds may be over long before there are enough rounds.
            round_s = (now - warm) / k if k else warm - begin
            self._begin_and_end = begin, max(begin + seconds, now + round_s * max(least - k, 1))
            self._round(clock, keep=True)
            if k % 2 == 0:
                # The backward in two parts needs less certainty: not in every round.
                for case in self.cases:
                    self._time_halves(case, clock)
        self._begin_and_end = None

    def worst_error(self) -> float:
        """Largest relative error of a heavy layer at any size, of the rounds so far."""
        found = 0.0
        for case in self.cases:
            pairs = [
                [f + b for f, b in zip(fs, bs, strict=True)]
                for fs, bs in zip(case.times["F"], case.times["B"], strict=True)
            ]
            found = max(found, worst_error(list(zip(*pairs, strict=True))))
        return found

    def _round(self, clock: Clock, *, keep: bool) -> None:
        """All sizes once, so that what slows the machine for a while hits all alike."""
        # By turns the one first and the other, so that neither always finds caches warmer.
        self._turn = not self._turn
        for case in self.cases:
            probe = _TimeProbe(self, clock, f"micro-batch size {case.size}")
            for layers in (self._turn, not self._turn):
                self._begin(case)
                if layers:
                    self._timed(case, 0, probe)
                else:
                    whole = self._time_whole(case, clock)
            if keep:
                case.times["F"].append(probe.seconds("F"))
                case.times["B"].append(probe.seconds("B"))
                case.whole.append(whole)
                for phase, pairs in probe.empty_marks.items():
                    case.empty_s[phase] += [clock.seconds(*pair) for pair in pairs]
                if case.captured:
                    case.note_starts()

    def _time_halves(self, case: MicroBatchCase, clock: Clock) -> None:
        """Time each layer's backward in two parts: to its inputs, and later to its weights; and
        count what it keeps between them."""
        self._begin(case)
        probe = _TimeProbe(self, clock, f"micro-batch size {case.size}", partly=True)
        self._timed(case, 1, probe)
        case.times["I"].append(probe.seconds("I"))
        case.times["W"].append(probe.seconds("W"))

    def _time_whole(self, case: MicroBatchCase, clock: Clock) -> tuple[float, float]:
        probe = _TimeProbe(self, clock, "", partly=True)
        self._timed(case, 2, probe)
        return probe.seconds("F")[0], probe.seconds("B")[0]

    def _timed(self, case: MicroBatchCase, which: int, probe: _TimeProbe) -> None:
        """Run a step, or replay it where it is captured."""
        if case.captured is None:
            (self._run_layers, self._run_halves, self._run_whole)[which](case, probe)
            return
        probe.clock.lead(len(case.captured[which]))
        case.captured[which].replay(probe)


class _WorkspaceProbe(Probe):
    """Notes each layer's largest working set besides what it is given and what it leaves."""

    def __init__(
        self, bench: Bench, case: MicroBatchCase, meter: LiveBytes | CudaMeter, say: str
    ) -> None:
        self.bench, self.case, self.meter, self.say = bench, case, meter, say
        self.base = 0

    def before(self, k: int, phase: Phase, arriving: Sequence[Tensor]) -> None:
        self.bench._report(f"{self.say}, {self.bench.parts[k]}")
        self.meter.reset_peak()
        self.base = self.meter.live - sum(storage_bytes(t) for t in arriving)

    def after(self, k: int, phase: Phase) -> None:
        left = self.meter.live if phase == "F" else self.base
        used = self.meter.peak - left
        self.case.workspace[k] = max(self.case.workspace[k], used, 0)


class _TimeProbe(Probe):
    """Takes a mark before and after everything. `partly`: no empty pieces are called."""

    def __init__(self, bench: Bench, clock: Clock, say: str, *, partly: bool = False) -> None:
        self.clock, self.say, self.bench = clock, say, bench
        self.parts = bench.parts
        self.marks: dict[tuple[int, Phase], list[Any]] = {}
        # Between layers, where caches are as warm as they are for the layers' own calls.
        self.stride = -(-len(self.parts) // _EMPTY_CALLS)
        # Nobody calls a layer that is replayed.
        captured = any(case.captured for case in bench.cases)
        self.calls_empty = not (partly or captured or bench.platform.computed)
        self.empty_marks: dict[Phase, list[tuple[Any, Any]]] = {"F": [], "B": []}

    def before(self, k: int, phase: Phase, arriving: Sequence[Tensor]) -> None:
        if self.say:
            self.bench._report(f"{self.say}, {self.parts[k]}")
        self.marks[k, phase] = [self.clock.mark()]

    def after(self, k: int, phase: Phase) -> None:
        self.marks[k, phase].append(self.clock.mark())
        if k % self.stride == 0 and self.calls_empty:
            self.empty_marks[phase].append(self._empty(phase))

    def _empty(self, phase: Phase) -> tuple[Any, Any]:
        """Call an empty piece, or its backward."""
        entry = Inlet().admit(torch.zeros(1, device=self.bench.platform.device))
        if phase == "F":
            start = self.clock.mark()
            _EMPTY(entry)
            return start, self.clock.mark()
        edges, grads = [get_gradient_edge(entry)], [torch.ones_like(entry)]
        start = self.clock.mark()
        torch.autograd.backward(edges, grads)
        return start, self.clock.mark()

    def seconds(self, phase: Phase) -> list[float]:
        """Of every part; 0 where it has no such phase."""
        self.clock.settle()
        found = (self.marks.get((k, phase)) for k in range(len(self.parts)))
        return [self.clock.seconds(*marks) if marks else 0.0 for marks in found]


def _empty_module() -> GraphBody:
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    return GraphBody(nn.Module(), graph)


_EMPTY = _empty_module()
