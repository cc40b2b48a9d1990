"""How much slower processes compute that share a machine's memory and caches.

Layers are measured alone; the stages of a run compute at the same time. So the whole model's step
is timed here alone and beside other processes that do nothing but such steps, in turns, so that
what slows the machine for a while hits both alike. The others are stopped and continued by
signals:
``python -m timeprest.profiles.measuring.contention TARGET BATCH THREADS DTYPE PIPE INPUT…``.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch

from ..errors import TargetError
from ..profile import Together, Totals
from ..target import Target, parse_input, resolve
from .platforms import Platform, platform_of
from .process_settings import end_with_parent, keep_freed_memory
from .step import roots_of

_MIN_ROUNDS, _MAX_ROUNDS = 5, 60
_LEAST_STEP_S = 0.05
_PATIENCE_S = 120.0
"""Longest wait for another process to import and build the model."""

_READY = b"r"


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
    """Time steps alone and beside `processes` − 1 others, for so many seconds, 5 rounds at least.
    `inputs`: what the target was found with (`target.parse_input`).

    Raises TargetError when another process can't run the model.
    """
    torch.set_num_threads(threads)
    step = _step(target, batch_size, Platform("cpu", torch.device("cpu"), None, autocast))
    dtype = "off" if autocast is None else str(autocast).removeprefix("torch.")
    command = ["-m", __name__, target.name, str(batch_size), str(threads), dtype]
    alone: list[float] = []
    beside: list[float] = []
    with _others(target.name, command, inputs, processes - 1) as others:
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
    # Both of a pair were timed within seconds, whatever the machine did before and after.
    ratio = median(both / one for both, one in zip(beside, alone, strict=True))
    return Together(processes=processes, slowdown=round(max(ratio, 1.0), 4))


def size_to_time(whole_model: Sequence[Totals]) -> int:
    """The smallest micro-batch whose step is long enough: the shorter, the more rounds."""
    long = (m.micro_batch for m in whole_model if m.forward_s + m.backward_s >= _LEAST_STEP_S)
    return next(long, whole_model[-1].micro_batch)


def _timed(step: Callable[[], None]) -> float:
    # The first one after the others stop or go on doesn't count: caches and clocks follow.
    step()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _step(target: Target, batch_size: int, platform: Platform) -> Callable[[], None]:
    """Forward and backward of the whole model, for a mini-batch."""
    model = target.model(0)
    model.train()
    call, expected = target.call(batch_size)

    def step() -> None:
        for p in model.parameters():
            p.grad = None
        with platform.forward_context():
            roots = roots_of(target, call.of(model), expected)
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    return step


@contextmanager
def _others(
    name: str, command: Sequence[str], inputs: Sequence[str], count: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that are ready, and stopped. Raises TargetError."""
    started: list[subprocess.Popen[bytes]] = []
    pipes: list[int] = []
    try:
        for _ in range(count):
            # Not through stdout: the user's model may print.
            ours, theirs = os.pipe()
            pipes.append(ours)
            try:
                started.append(
                    subprocess.Popen(
                        [sys.executable, *command, str(theirs), *inputs],
                        pass_fds=(theirs,),
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
            finally:
                os.close(theirs)
        deadline = time.monotonic() + _PATIENCE_S
        for other, pipe in zip(started, pipes, strict=True):
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TargetError(
                    f"{name}: not ready in another process within {_PATIENCE_S:.0f} s"
                )
            if os.read(pipe, 1) != _READY:
                raise TargetError(f"{name}: can't be run in several processes at once")
            other.send_signal(signal.SIGSTOP)
        yield started
    finally:
        for pipe in pipes:
            os.close(pipe)
        for other in started:
            with contextlib.suppress(OSError):
                other.kill()
            other.wait()


def main(arguments: Sequence[str]) -> None:
    """Say that the model is there, and make steps until the process or its parent is ended."""
    parent = os.getppid()
    end_with_parent(parent)
    name, batch_size, threads, dtype, pipe, *inputs = arguments
    keep_freed_memory()
    torch.set_num_threads(int(threads))
    target = resolve(name, [parse_input(text) for text in inputs])
    platform = platform_of("cpu", None, None if dtype == "off" else dtype)
    step = _step(target, int(batch_size), platform)
    step()
    os.write(int(pipe), _READY)
    while os.getppid() == parent:
        step()


if __name__ == "__main__":
    main(sys.argv[1:])
