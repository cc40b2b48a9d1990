"""Measuring the links between processes, of this machine or of several: message times and
all-reduce times."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import msgspec
import torch
import torch.distributed as dist
from msgspec import Meta
from torch import Tensor

from ...planner.cluster.link_fit import LinkPoint, error_of_median
from ...planner.systems.operations import BACKWARD, FORWARD
from ...profiles.errors import RunError, UserError
from ...profiles.files import write_bytes
from ...profiles.tracing.shapes import ValueSpec
from ...profiles.units import format_bytes
from ..communication.channel import Channels, PeerError, why_lost
from ..prepare.devices import gpu_count
from ..prepare.messages import MessageRoute
from ..prepare.workers import Replica
from ..processes.launcher import run_workers
from ..records.growing_file import new_lines
from ..records.run_dir import RunDir

MESSAGE_BYTES = tuple(4096 * 4**k for k in range(8))
"""4 KiB to 64 MiB by powers of 4."""

CAP_S = 0.6
"""Time for one message size, for all pairs together, and as much for its all-reduce."""

TIMEOUT_S = 10.0
"""Longest wait for another process of this machine, once all have started."""

FAR_TIMEOUT_S = 90.0
"""Of another machine: over 100 Mbit/s the largest message takes 11 s there and back."""

MAX_PROCESSES = 64
"""Each one loads torch; more of them on one machine would measure its memory."""

Progress = Callable[[str, int, int], None]
"""Is told what is at hand, and how much of how much is done."""


class LinkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How links are measured; workers read it from their folder."""

    device: str
    message_bytes: Annotated[tuple[int, ...], Meta(min_length=2)]
    cap_s: Annotated[float, Meta(gt=0)] = CAP_S
    precision: Annotated[float, Meta(gt=0)] = 0.02
    """Relative standard error of a median that is good enough."""
    timeout_s: Annotated[float, Meta(gt=0)] = TIMEOUT_S


class LinkTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured times of messages and all-reduces.

    Attributes:
        pairs: for processes (0, 1), (1, 2), …: half a round trip for each message size.
        backend: what messages went by, and sums.
        all_reduce: a sum over all processes, for the same sizes.
        machines: name of each process's; empty: all are on one.
    """

    processes: int
    device: str
    backend: str
    pairs: tuple[tuple[LinkPoint, ...], ...]
    all_reduce: tuple[LinkPoint, ...]
    machines: tuple[str, ...] = ()


class LinkDir(RunDir):
    """A measurement's temporary folder: errors and logs as of a run.

    Attributes:
        settings: file of the settings, for the workers.
        progress: file of the progress: lines of JSON [what, done, of].
        times: file of the result.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.settings = self.path / "settings.json"
        self.progress = self.path / "progress.jsonl"
        self.times = self.path / "times.json"


def backend_of(device: str) -> str:
    """torch.distributed's transport for a device's tensors."""
    return {"cpu": "gloo", "cuda": "nccl"}[device]


def link_routes(
    pairs: Iterable[int], message_bytes: Iterable[int]
) -> dict[int, dict[int, MessageRoute]]:
    """Of each pair, a route for messages of each size: those measured, and a tiny one's."""
    found: dict[int, dict[int, MessageRoute]] = {}
    number = 0
    for pair in pairs:
        ends = (Replica(pair, pair, pair), Replica(pair + 1, pair + 1, pair + 1))
        for nbytes in (_TINY_BYTES, *message_bytes):
            spec = ValueSpec(f"{nbytes} bytes", "tensor", (nbytes // 4,), torch.float32, True)
            route = MessageRoute(number, spec, *ends, (0,), 1)
            found.setdefault(pair, {})[nbytes], number = route, number + 1
    return found


_TINY_BYTES = 4


def check_gpus(processes: int) -> None:
    """Raise UserError unless this machine has a GPU for each."""
    found = gpu_count()
    if found < processes:
        raise UserError(
            f"device cuda: {processes} processes need a GPU each, and there are {found}; "
            "ask for fewer processes, or measure cpu"
        )


def measure_links(
    processes: int = 2,
    device: str = "cpu",
    *,
    message_bytes: Sequence[int] = MESSAGE_BYTES,
    cap_s: float = CAP_S,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> LinkTimes:
    """Time messages between neighbouring local processes, and all-reduce over all of them.

    Args:
        processes: how many are started; process k talks to process k + 1.
        device: "cpu" (gloo, as between hosts; stages on one host have shared memory) or "cuda"
            (CUDA IPC, as stages on one host have; sums by NCCL; a GPU for each process).
        message_bytes: message sizes.
        cap_s: time for one size, for all pairs together, and as much for its all-reduce.
        timeout_s: longest wait for another process, once all have started.
        progress: called from a thread while the workers measure.

    Raises:
        UserError: too few processes or GPUs.
        RunError: a worker died, got stuck, or failed; all have ended.
        KeyboardInterrupt: stopped by the user; all workers have ended.
    """
    if not 2 <= processes <= MAX_PROCESSES:
        raise UserError(f"processes: give 2 to {MAX_PROCESSES}, not {processes}")
    if device not in ("cpu", "cuda"):
        raise UserError(f"device: links are measured on cpu or cuda, not {device!r}")
    if device == "cuda":
        check_gpus(processes)
    settings = LinkSettings(
        device=device, message_bytes=tuple(message_bytes), cap_s=cap_s, timeout_s=timeout_s
    )
    with tempfile.TemporaryDirectory(prefix="timeprest-links-") as folder:
        where = LinkDir(folder)
        write_bytes(where.settings, msgspec.json.encode(settings))
        labels = [f"process {rank}" for rank in range(processes)]
        position = 0

        def poll() -> None:
            nonlocal position
            lines, position = new_lines(where.progress, position)
            if lines and progress is not None:
                progress(*msgspec.json.decode(lines[-1], type=tuple[str, int, int]))

        run_workers(f"{__package__}.link_worker", where, labels, poll, logs_kept=False)
        try:
            return msgspec.json.decode(where.times.read_bytes(), type=LinkTimes)
        except (OSError, msgspec.DecodeError) as error:
            raise RunError(f"the workers ended without a result: {error}") from None


# Bursts: the same operation of the same size a few times over, timed one by one -----------------
# Process 0 leads: it says to all which burst comes next, and everybody follows. So pairs and sizes
# take turns, a drift of the machine hits all alike, and nobody waits longer than for one burst.

ALL_REDUCE = -1
"""In place of a pair: a sum over all processes."""
_END = -2


class Process:
    """One process's part in the bursts. A pair p is the processes p and p + 1.

    Every method raises PeerError when another process is gone, or for longer than `timeout_s`
    doesn't answer.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        timeout_s: float,
        by_size: Mapping[int, Mapping[int, MessageRoute]] | None = None,
        channels: Channels | None = None,
    ) -> None:
        """
        Args:
            by_size: of the pairs whose messages go through `channels`, their routes by bytes of a
                message; those of the others go by torch.distributed.
        """
        self.rank = rank
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.timeout = timedelta(seconds=timeout_s)
        self._outgoing: dict[int, Tensor] = {}
        self._by_size = by_size or {}
        self._channels = channels

    def follow(self) -> None:
        """Do what process 0 says, until it ends the measurement."""
        command = torch.empty(3, dtype=torch.int64)
        while True:
            self._broadcast(command)
            pair, message_bytes, repetitions = command.tolist()
            if pair == _END:
                return
            times = self._burst(pair, message_bytes, repetitions)
            if pair == self.rank:
                with self._talking_to("process 0"):
                    report = torch.tensor(times, dtype=torch.float64)
                    self._wait_for(dist.isend(report, 0))

    def lead(self, pair: int, message_bytes: int, repetitions: int) -> list[float]:
        """For process 0: have all make a burst.

        Returns:
            Seconds of each repetition: of half a round trip, or of an all-reduce.
        """
        self._broadcast(torch.tensor([pair, message_bytes, repetitions]))
        times = self._burst(pair, message_bytes, repetitions)
        if pair > 0:
            report = torch.empty(repetitions, dtype=torch.float64)
            with self._talking_to(f"process {pair}"):
                self._wait_for(dist.irecv(report, pair))
            times = report.tolist()
        return times

    def end(self) -> None:
        """For process 0: tell all that it was the last burst."""
        self._broadcast(torch.tensor([_END, 0, 0]))

    def _broadcast(self, command: Tensor) -> None:
        with self._talking_to("the others" if self.rank == 0 else "process 0"):
            self._wait_for(dist.broadcast(command, 0, async_op=True))

    def _burst(self, pair: int, message_bytes: int, repetitions: int) -> list[float]:
        """Seconds of each repetition where it is timed; an empty list elsewhere."""
        if pair == ALL_REDUCE:
            return self._all_reduce(message_bytes, repetitions)
        if self.rank == pair:
            return self._ping(message_bytes, repetitions)
        if self.rank == pair + 1:
            self._pong(message_bytes, repetitions)
        return []

    def _all_reduce(self, message_bytes: int, repetitions: int) -> list[float]:
        times = []
        with self._talking_to("the others"):
            for tensor in self._messages(message_bytes, repetitions):
                begin = time.perf_counter()
                self._wait_for(dist.all_reduce(tensor, async_op=True), on_gpu=self.on_gpu)
                self._finish()
                times.append(time.perf_counter() - begin)
        return times[1:]

    def _ping(self, message_bytes: int, repetitions: int) -> list[float]:
        """Send, and receive as much: half of each round trip."""
        peer = self.rank + 1
        times = []
        if self._channels is not None and self.rank in self._by_size:
            for outgoing in self._messages(message_bytes, repetitions):
                route = self._by_size[self.rank][outgoing.nbytes]
                begin = time.perf_counter()
                self._channels.send(route, FORWARD, outgoing)
                self._channels.receive(route, BACKWARD)
                self._finish()
                times.append((time.perf_counter() - begin) / 2)
            return times[1:]
        with self._talking_to(f"process {peer}"):
            for outgoing in self._messages(message_bytes, repetitions):
                incoming = torch.empty_like(outgoing)
                # As between stages, receives are posted ahead, into memory that is new. NCCL
                # works off in sequence what two processes have for each other: there the send
                # must come first.
                receive = None if self.on_gpu else dist.irecv(incoming, peer)
                begin = time.perf_counter()
                send = dist.isend(outgoing, peer)
                receive = receive or dist.irecv(incoming, peer)
                self._wait_for(send, on_gpu=self.on_gpu)
                self._wait_for(receive, on_gpu=self.on_gpu)
                self._finish()
                times.append((time.perf_counter() - begin) / 2)
        return times[1:]

    def _pong(self, message_bytes: int, repetitions: int) -> None:
        peer = self.rank - 1
        if self._channels is not None and peer in self._by_size:
            for outgoing in self._messages(message_bytes, repetitions):
                route = self._by_size[peer][outgoing.nbytes]
                self._channels.receive(route, FORWARD)
                self._channels.send(route, BACKWARD, outgoing[None])
            self._finish()
            return
        with self._talking_to(f"process {peer}"):
            messages = list(self._messages(message_bytes, repetitions))
            receive = dist.irecv(torch.empty_like(messages[0]), peer)
            for k, outgoing in enumerate(messages):
                following = messages[k + 1 : k + 2]
                self._wait_for(receive, on_gpu=self.on_gpu)
                if following and not self.on_gpu:
                    receive = dist.irecv(torch.empty_like(following[0]), peer)
                self._wait_for(dist.isend(outgoing, peer), on_gpu=self.on_gpu)
                if following and self.on_gpu:
                    receive = dist.irecv(torch.empty_like(following[0]), peer)
            self._finish()

    def _messages(self, message_bytes: int, repetitions: int) -> Iterator[Tensor]:
        """First a tiny one whose time doesn't count: after it, everybody is there.

        Zeros, so that sums stay as they are however often.
        """
        yield torch.zeros(1, device=self.device)
        large = self._outgoing.get(message_bytes)
        if large is None:
            large = torch.zeros(message_bytes // 4, device=self.device)
            self._outgoing[message_bytes] = large
        for _ in range(repetitions):
            yield large

    def _wait_for(self, work: dist.Work | None, *, on_gpu: bool = False) -> None:
        """Words between the processes go by gloo whatever the device is; of what is measured
        `on_gpu`, only what comes next there waits."""
        assert work is not None
        if on_gpu:
            work.wait()
        else:
            work.wait(self.timeout)

    def _finish(self) -> None:
        """Wait, within the bound, until the GPU has done all that it was given."""
        if not self.on_gpu:
            return
        event = torch.cuda.Event()
        event.record()
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not event.query():
            if time.monotonic() > deadline:
                raise RuntimeError("Timed out")

    @contextmanager
    def _talking_to(self, whom: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            why = why_lost(error, self.timeout, option="")
            raise PeerError(f"process {self.rank}: waiting for {whom}: {why}") from error


# As many bursts of each size as it takes to know its time well enough -----------------------------

BURST_S = 0.01
MAX_REPETITIONS = 50
# Of the few bursts that were possible when time is out; and before an error is trusted.
MIN_BURSTS = 7
TRUSTED_BURSTS = 15
# Of messages that take so many times the cap together, over slow links.
FEWEST_BURSTS = 3
FAR_BEYOND = 5
PROGRESS_S = 0.1


@dataclass
class TimedOperation:
    """An operation at one size, and its measured times.

    Attributes:
        pair: p for messages between processes p and p + 1, or ALL_REDUCE.
        message_bytes: size of the message, or of the tensor that is summed.
        cap_s: time that may be spent on it.
        medians: of the bursts, in seconds.
        count: repetitions so far.
        spent_s: time so far.
    """

    pair: int
    message_bytes: int
    cap_s: float
    medians: list[float] = field(default_factory=list)
    count: int = 0
    spent_s: float = 0.0

    def burst(self, process: Process) -> None:
        """Have another burst made, and note it."""
        # The first one is a single repetition: how long they take isn't known.
        expected_s = median(self.medians) if self.medians else BURST_S
        repetitions = max(1, min(MAX_REPETITIONS, int(BURST_S / max(expected_s, 1e-9))))
        begin = time.perf_counter()
        self.medians.append(median(process.lead(self.pair, self.message_bytes, repetitions)))
        self.spent_s += time.perf_counter() - begin
        self.count += repetitions

    def share_done(self, precision: float) -> float:
        """From 0 to 1, which is: precise enough, or out of time."""
        bursts = len(self.medians)
        precise = bursts >= TRUSTED_BURSTS and error_of_median(self.medians) <= precision
        out_of_time = bursts >= MIN_BURSTS and self.spent_s >= self.cap_s
        too_slow = bursts >= FEWEST_BURSTS and self.spent_s >= FAR_BEYOND * self.cap_s
        if precise or out_of_time or too_slow:
            return 1.0
        return min(0.99, max(bursts / TRUSTED_BURSTS, self.spent_s / self.cap_s))

    def point(self) -> LinkPoint:
        """What was measured, as a link file has it."""
        return LinkPoint(
            message_bytes=self.message_bytes,
            seconds=median(self.medians),
            error=error_of_median(self.medians),
            repetitions=self.count,
        )


def lead(
    process: Process,
    processes: int,
    settings: LinkSettings,
    progress: Progress,
    backend: str,
) -> LinkTimes:
    """Measure everything; for process 0. `backend`: what messages go by."""
    pairs = range(processes - 1)
    shares = {pair: settings.cap_s / len(pairs) for pair in pairs} | {ALL_REDUCE: settings.cap_s}
    cells = [
        TimedOperation(pair, size, cap_s)
        for size in settings.message_bytes
        for pair, cap_s in shares.items()
    ]
    for cell in cells:
        # Connect, allocate and fill caches; the times don't count.
        for _ in range(2):
            process.lead(cell.pair, cell.message_bytes, 1)
    # Burst by burst, until no cell needs more. A cell that has enough is left out.
    shown, left = 0.0, cells
    while left:
        for cell in left:
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                done = fmean(c.share_done(settings.precision) for c in cells)
                progress(format_bytes(cell.message_bytes), int(1000 * done), 1000)
            cell.burst(process)
        left = [cell for cell in left if cell.share_done(settings.precision) < 1]
    points = {pair: tuple(c.point() for c in cells if c.pair == pair) for pair in shares}
    found = LinkTimes(
        processes=processes,
        device=settings.device,
        backend=backend,
        pairs=tuple(points[pair] for pair in pairs),
        all_reduce=points[ALL_REDUCE],
    )
    process.end()
    return found
