"""Clocks to time layers with: the processor's, CUDA events, and one that computes time."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes marks while work goes on; what lies between two is known once it has settled."""

    def mark(self) -> Any:
        """A point in time on the device."""

    def settle(self) -> None:
        """Wait until all marks are there."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two settled marks."""


class CpuClock:
    """The processor's own clock; work is done when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """CUDA events: what the device took, not the host that feeds it."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) * 1e-3


class Counter(Protocol):
    """What a computed clock reads: `roofline.Roofline` is one."""

    seconds: float


class ComputedClock:
    """Time that is added up by a model of the device as operations run, not measured."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def mark(self) -> float:
        return self.counter.seconds

    def settle(self) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start
