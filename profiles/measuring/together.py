"""How much slower processes compute that share a machine's memory and caches.

Layers are measured alone; the stages of a run compute at the same time. So the whole model's step
is timed here alone and beside other processes that do nothing but such steps, in turns, so that
what slows the machine for a while hits both alike. The others are stopped and continued by
signals: ``python -m timeprest.profiles.measuring.together TARGET BATCH THREADS DTYPE INPUT…``.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch.utils._pytree import tree_leaves

from ..allocator import keep_freed_memory
from ..errors import TargetError
from ..profile import Together
from ..target import Target, parse_input, resolve
from .platforms import Platform, platform_of

_MIN_ROUNDS, _MAX_ROUNDS = 5, 60
_SETTLING_STEPS = 1
"""Steps after the others stop or go on that don't count: caches and clocks follow."""
_PATIENCE_S = 120.0
"""Longest wait for another process to import and build the model."""

_READY = b"ready\n"


def measure_together(
    target: Target,
    inputs: Sequence[str],
    processes: int,
    *,
    batch_size: int,
    threads: int,
    autocast: torch.dtype | None,
    seconds: float,
) -> Together:
    """Time steps alone and beside `processes` − 1 others.

    Args:
        inputs: what the target was found with (`target.parse_input`).
        seconds: to spend on it; 5 rounds at least are made.

    Raises TargetError when another process can't run the model.
    """
    torch.set_num_threads(threads)
    step = _step(target, batch_size, Platform("cpu", torch.device("cpu"), None, autocast))
    dtype = "off" if autocast is None else str(autocast).removeprefix("torch.")
    command = [sys.executable, "-m", __name__, target.name, str(batch_size), str(threads), dtype]
    alone: list[float] = []
    beside: list[float] = []
    with _others([*command, *inputs], processes - 1) as others:
        begin = time.monotonic()
        while len(beside) < _MIN_ROUNDS or (
            time.monotonic() - begin < seconds and len(beside) < _MAX_ROUNDS
        ):
            alone.append(_timed(step))
            for other in others:
                other.send_signal(signal.SIGCONT)
            beside.append(_timed(step))
            for other in others:
                other.send_signal(signal.SIGSTOP)
                if other.poll() is not None:
                    raise TargetError(f"{target.name}: a process beside this one has ended")
    ratio = max(1.0, median(beside) / median(alone))
    return Together(processes=processes, slowdown=round(ratio, 4))


def _timed(step: Callable[[], None]) -> float:
    for _ in range(_SETTLING_STEPS):
        step()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _step(target: Target, batch_size: int, platform: Platform) -> Callable[[], None]:
    """Forward and backward of the whole model, for a mini-batch."""
    model = target.model(0)
    model.train()
    call, expected = target.call(batch_size)
    task = target.task

    def step() -> None:
        for p in model.parameters():
            p.grad = None
        with platform.forward_context():
            result = call.of(model)
            if task is not None:
                loss = task.loss(result, expected)
            else:
                made = (t for t in tree_leaves(result) if isinstance(t, torch.Tensor))
                loss = torch.stack([t.sum() for t in made if t.requires_grad]).sum()
        loss.backward()

    return step


@contextmanager
def _others(command: Sequence[str], count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that are ready, and stopped."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            )
        for other in started:
            assert other.stdout is not None
            if other.stdout.readline() != _READY:
                raise TargetError(f"{command[3]}: can't be run in several processes at once")
            other.send_signal(signal.SIGSTOP)
        yield started
    finally:
        for other in started:
            with contextlib.suppress(OSError):
                other.kill()
            other.wait()


def main(arguments: Sequence[str]) -> None:
    """Say that the model is there, and make steps until the process is ended."""
    name, batch_size, threads, dtype, *inputs = arguments
    keep_freed_memory()
    torch.set_num_threads(int(threads))
    target = resolve(name, [parse_input(text) for text in inputs])
    platform = platform_of("cpu", None, None if dtype == "off" else dtype)
    step = _step(target, int(batch_size), platform)
    step()
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    while True:
        step()


if __name__ == "__main__":
    main(sys.argv[1:])
