"""How fast one core is at this moment: two short loops, each time that a line comes in.

A process of its own, that waits for nothing but lines (`pace` starts one for each core).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

LOOP_S = 0.1
_SIDE, _FLOATS = 256, 6 << 20


def rate(work: Callable[[], object]) -> float:
    """Times a second."""
    count, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < LOOP_S:
        work()
        count += 1
    return count / passed


def main() -> None:
    """Answer each line with the rates of multiplying matrices and of going through memory."""
    a = np.ones((_SIDE, _SIDE), np.float32)
    out = np.empty_like(a)
    much = np.ones(_FLOATS, np.float32)
    for _ in sys.stdin:
        compute = rate(lambda: np.matmul(a, a, out=out))
        memory = rate(lambda: np.multiply(much, 1.0, out=much))
        print(compute, memory, flush=True)


if __name__ == "__main__":
    main()
