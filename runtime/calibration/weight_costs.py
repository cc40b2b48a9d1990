"""What weights and saved tensors cost a stage besides computing: timed on the runtime's own parts.

By byte of parameters: looking whether gradients are finite, keeping a version, making one between
two, predicting one. By tensor that autograd keeps: the hooks that keep weights out of its graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import msgspec
import torch
from torch import Tensor, nn

from ...profiles.profile import OperationCost
from ..stage.finite import STOP, NotFinite
from ..weights.prediction import Predictor
from ..weights.stash import WeightVersions

SIDE, COUNT = 1024, 4
"""Parameters: more than the caches next to a core hold, as a stage's are."""
CHAIN = 200
"""Operations that keep two tensors each."""
REPEATS = 9


def with_weight_costs(cost: OperationCost) -> OperationCost:
    """The same, with what was measured here."""
    pack_s, unpack_s = _hooks()
    # Zeros may be no memory at all.
    parameters = [nn.Parameter(torch.ones(SIDE, SIDE)) for _ in range(COUNT)]
    nbytes = sum(p.numel() * p.element_size() for p in parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    weights = WeightVersions(parameters)
    predictor = Predictor("smoothed-gradient", optimizer)
    into = dict(zip(parameters, weights.scratch(), strict=True))
    checks = NotFinite(STOP)
    weights.keep_latest()
    weights.advance({0})

    def keep() -> None:
        weights.keep_latest()
        weights.advance({0})

    def per_byte(work: Callable[[], object]) -> float:
        return _timed(work) / nbytes

    return msgspec.structs.replace(
        cost,
        pack_s=pack_s,
        unpack_s=unpack_s,
        update_s_per_byte=per_byte(lambda: checks.check_gradients(0, parameters)),
        mix_s_per_byte=per_byte(lambda: weights.between(0, 0.5, reuse=False)),
        predict_s_per_byte=per_byte(lambda: predictor.predict(1, into)),
        # The last: it numbers versions on.
        keep_s_per_byte=per_byte(keep),
    )


def _hooks() -> tuple[float, float]:
    """Seconds of a tensor that is packed, and of one that is unpacked."""
    weights = WeightVersions([nn.Parameter(torch.ones(8))])
    plain, hooked = [], []
    for _ in range(REPEATS):
        plain.append(_chain(None))
        hooked.append(_chain(weights))
    forward_s, backward_s = (
        max(median(with_them) - median(without), 0.0) / (2 * CHAIN)
        for with_them, without in zip(
            zip(*hooked, strict=True), zip(*plain, strict=True), strict=True
        )
    )
    return round(forward_s, 9), round(backward_s, 9)


def _chain(weights: WeightVersions | None) -> tuple[float, float]:
    """Seconds of a forward and a backward that keep many small tensors."""
    x = torch.ones(8, requires_grad=True)
    begin = time.perf_counter()
    if weights is None:
        end = _multiplied(x)
    else:
        with weights.forward(None):
            end = _multiplied(x)
    middle = time.perf_counter()
    if weights is None:
        end.backward()
    else:
        with weights.backward(None):
            end.backward()
    return middle - begin, time.perf_counter() - middle


def _multiplied(x: Tensor) -> Tensor:
    y = x
    for _ in range(CHAIN):
        y = y * x
    return y.sum()


def _timed(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return median(times)
