"""The overhead of running a stage: what it costs besides its layers, measured on a tiny network.

Its profile says what its layers take; what its stages take more is the price of operations
themselves: Python's, mostly.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from statistics import fmean, median
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ...planner.cluster.cluster import uniform_cluster
from ...planner.schedules.schedules import make_schedule
from ...planner.search.solve import solve
from ...planner.simulator.pipeline import Pipeline
from ...planner.systems.operations import BACKWARD, FORWARD, UPDATE, Op
from ...profiles.measuring.contention import measure_together, size_to_time
from ...profiles.measuring.measure import measure
from ...profiles.profile import OperationCost, Profile
from ...profiles.target import Target, resolve
from ..prepare.prepare import prepare
from ..settings import RunSettings
from ..stage.gradients import finite_gradients
from ..training.runners import local_runners
from ..weights.prediction import Predictor
from ..weights.stash import WeightVersions

# Of weight versions and saved tensors, timed on the runtime's own parts -------------------------
# By byte of parameters: looking whether gradients are finite, keeping a version, making one
# between two, predicting one. By tensor that autograd keeps: the hooks that keep weights out of
# its graphs.

SIDE, COUNT = 1024, 4
"""Parameters: more than the caches next to a core hold, as a stage's are."""
CHAIN = 200
"""Operations that keep two tensors each."""
REPEATS = 9
WALKED_BYTES = 1 << 26
"""Read before each time, so that weights come from memory, as behind a backward: more than the
caches hold that cores share."""


def with_weight_costs(cost: OperationCost) -> OperationCost:
    """The cost of operations, with that of weight versions and saved tensors measured."""
    pack_s, unpack_s = _hooks()
    # Zeros may be no memory at all.
    parameters = [nn.Parameter(torch.ones(SIDE, SIDE)) for _ in range(COUNT)]
    nbytes = sum(p.nbytes for p in parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    weights = WeightVersions(parameters)
    predictor = Predictor("smoothed-gradient", optimizer)
    into = dict(zip(parameters, weights.scratch(), strict=True))
    weights.keep_latest()
    weights.advance({0})

    def keep() -> None:
        weights.keep_latest()
        weights.advance({0})

    others = torch.ones(WALKED_BYTES // 4)

    def per_byte(work: Callable[[], object]) -> float:
        times = []
        for _ in range(REPEATS):
            others.sum()
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return median(times) / nbytes

    return msgspec.structs.replace(
        cost,
        pack_s=pack_s,
        unpack_s=unpack_s,
        update_s_per_byte=per_byte(lambda: finite_gradients(parameters)),
        mix_s_per_byte=per_byte(lambda: weights.between(0, 0.5, reuse=False)),
        predict_s_per_byte=per_byte(lambda: predictor.forward_weights(1, into)),
        # The last: it numbers versions on.
        keep_s_per_byte=per_byte(keep),
    )


def _hooks() -> tuple[float, float]:
    """Seconds of a tensor that is packed, and of one that is unpacked.

    Differences of the shortest times: what else runs on the machine only adds, to either side,
    and medians of these short chains then differ by less than nothing.
    """
    weights = WeightVersions([nn.Parameter(torch.ones(8))])
    plain, hooked = [], []
    for _ in range(REPEATS):
        plain.append(_chain(None))
        hooked.append(_chain(weights))
    forward_s, backward_s = (
        max(min(with_them) - min(without), 0.0) / (2 * CHAIN)
        for with_them, without in zip(
            zip(*hooked, strict=True), zip(*plain, strict=True), strict=True
        )
    )
    return round(forward_s, 9), round(backward_s, 9)


def _chain(weights: WeightVersions | None) -> tuple[float, float]:
    """Seconds of a forward and a backward that keep many small tensors."""
    x = torch.ones(8, requires_grad=True)
    begin = time.perf_counter()
    with nullcontext() if weights is None else weights.forward(None):
        y = x
        for _ in range(CHAIN):
            y = y * x
        end = y.sum()
    middle = time.perf_counter()
    with nullcontext() if weights is None else weights.backward(None):
        end.backward()
    return middle - begin, time.perf_counter() - middle


# Of operations, measured on a tiny network ------------------------------------------------------

MINI_BATCH, MICRO_BATCHES, STEPS = 16, 4, 120
_SETTLING = 20
_PROFILE_S = 0.5


class SmallTask:
    """Four linear layers of eight."""

    def model(self) -> nn.Module:
        """Two layers for each of two stages."""
        return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def data(self, split: str) -> TensorDataset:
        """Zeros."""
        x = torch.zeros(MINI_BATCH * STEPS, 8)
        return TensorDataset(x, x)

    def loss(self, output: Any, target: Any) -> Tensor:
        """Mean squares."""
        return nn.functional.mse_loss(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Plain steps."""
        return torch.optim.SGD(parameters, lr=0.01)


def with_processes(
    profile: Profile, target: Target, inputs: Sequence[str], processes: int, *, seconds: float
) -> Profile:
    """The profile with what stages cost besides its layers (`tp-profile --together`).

    Args:
        target, inputs: what the profile is of, and what it was found with.
        processes: that compute at once.
        seconds: to spend on timing them.
    """
    together = measure_together(
        target,
        inputs,
        processes,
        batch_size=size_to_time(profile.whole_model),
        threads=profile.threads,
        autocast=None if profile.autocast is None else getattr(torch, profile.autocast),
        seconds=seconds,
    )
    operation = measure_operations(profile.threads)
    return msgspec.structs.replace(profile, together=together, operation=operation)


def measure_operations(threads: int) -> OperationCost:
    """Run a small network's stages in this process, and take off what its profile says of them."""
    target = f"{__name__}:{SmallTask.__name__}"
    profile = measure(
        resolve(target),
        batch_size=MINI_BATCH,
        micro_batch_sizes=[MINI_BATCH // MICRO_BATCHES],
        threads=threads,
        seconds=_PROFILE_S,
    )
    cluster = uniform_cluster(2)
    plan = solve(profile, cluster, "timeprest", stages=2, micro_batches=MICRO_BATCHES)
    settings = RunSettings(task=target, steps=STEPS, threads=threads, evaluate=False)
    prepared = prepare(plan, settings)
    runners = local_runners(prepared)
    segment = prepared.segments[0]
    schedule = make_schedule(prepared.pipeline, segment.mini_batches)
    for runner in runners:
        runner.begin(segment, schedule)
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for b in range(segment.mini_batches):
        forwards = [(s, Op(FORWARD, b, i)) for i in range(MICRO_BATCHES) for s in (0, 1)]
        after = [(s, Op(kind, b)) for s in (1, 0) for kind in (BACKWARD, UPDATE)]
        for s, op in (*forwards, *after):
            begin = time.perf_counter()
            runners[s].run(op)
            times[s, op.kind].append(time.perf_counter() - begin)
    found = with_weight_costs(overhead(prepared.pipeline, times))
    # What hooks took of these few layers is counted by their tensors from now on.
    counts = [layer.measurements[0].saved_tensors or 0 for layer in profile.layers]
    tensors = sum(counts) / len(runners)
    return msgspec.structs.replace(
        found,
        forward_s=round(max(found.forward_s - tensors * found.pack_s, 0.0), 9),
        mini_batch_s=round(
            max(found.mini_batch_s - MICRO_BATCHES * tensors * found.unpack_s, 0.0), 9
        ),
    )


def overhead(pipeline: Pipeline, times: Mapping[tuple[int, str], Sequence[float]]) -> OperationCost:
    """What operations took beyond what the pipeline says, the mean over stages.

    Args:
        times: by stage and kind, in seconds; the first ones don't count.
    """

    def took(stage: int, kind: str) -> float:
        found = times[stage, kind]
        return median(found[_SETTLING * len(found) // STEPS :])

    stages = range(pipeline.stages)
    forward_s = fmean(took(s, FORWARD) - pipeline.forward_s[s] for s in stages)
    mini_batch_s = fmean(
        took(s, BACKWARD) - pipeline.backward_op_s(s) + took(s, UPDATE) - pipeline.update_s[s]
        for s in stages
    )
    return OperationCost(
        forward_s=round(max(forward_s, 0.0), 9), mini_batch_s=round(max(mini_batch_s, 0.0), 9)
    )
