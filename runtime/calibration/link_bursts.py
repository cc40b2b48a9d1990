"""Bursts: the same operation of the same size a few times over, timed one by one.

Process 0 leads: it says to all which burst comes next, and everybody follows. So pairs and sizes
take turns, a drift of the machine hits all alike, and nobody waits longer than for one burst.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..communication.peers import PeerError

ALL_REDUCE = -1
"""In place of a pair: a sum over all processes."""
_END = -2


class Process:
    """One process's part in the bursts. A pair p is the processes p and p + 1.

    Every method raises PeerError when another process is gone, or for longer than `timeout_s`
    doesn't answer.
    """

    def __init__(self, rank: int, device: str, timeout_s: float) -> None:
        self.rank = rank
        self.on_gpu = device == "cuda"
        self.device = torch.device("cuda", rank) if self.on_gpu else torch.device("cpu")
        self.timeout = timedelta(seconds=timeout_s)
        self._outgoing: dict[int, Tensor] = {}

    def follow(self) -> None:
        """Do what process 0 says, until it ends the measurement."""
        order = torch.empty(3, dtype=torch.int64)
        while True:
            self._hear(order)
            pair, message_bytes, repetitions = order.tolist()
            if pair == _END:
                return
            times = self._burst(pair, message_bytes, repetitions)
            if pair == self.rank:
                with self._talking_to("process 0"):
                    report = torch.tensor(times, dtype=torch.float64)
                    self._told(dist.isend(report, 0))

    def lead(self, pair: int, message_bytes: int, repetitions: int) -> list[float]:
        """For process 0: have all make a burst.

        Returns:
            Seconds of each repetition: of half a round trip, or of an all-reduce.
        """
        self._hear(torch.tensor([pair, message_bytes, repetitions]))
        times = self._burst(pair, message_bytes, repetitions)
        if pair > 0:
            report = torch.empty(repetitions, dtype=torch.float64)
            with self._talking_to(f"process {pair}"):
                self._told(dist.irecv(report, pair))
            times = report.tolist()
        return times

    def end(self) -> None:
        """For process 0: tell all that it was the last burst."""
        self._hear(torch.tensor([_END, 0, 0]))

    def _hear(self, order: Tensor) -> None:
        with self._talking_to("the others" if self.rank == 0 else "process 0"):
            self._told(dist.broadcast(order, 0, async_op=True))

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
                self._sent(dist.all_reduce(tensor, async_op=True))
                self._finish()
                times.append(time.perf_counter() - begin)
        return times[1:]

    def _ping(self, message_bytes: int, repetitions: int) -> list[float]:
        """Send, and receive as much: half of each round trip."""
        peer = self.rank + 1
        times = []
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
                self._sent(send)
                self._sent(receive)
                self._finish()
                times.append((time.perf_counter() - begin) / 2)
        return times[1:]

    def _pong(self, message_bytes: int, repetitions: int) -> None:
        """Receive, and send as much back."""
        peer = self.rank - 1
        with self._talking_to(f"process {peer}"):
            messages = list(self._messages(message_bytes, repetitions))
            receive = dist.irecv(torch.empty_like(messages[0]), peer)
            for k, outgoing in enumerate(messages):
                following = messages[k + 1 : k + 2]
                self._sent(receive)
                if following and not self.on_gpu:
                    receive = dist.irecv(torch.empty_like(following[0]), peer)
                self._sent(dist.isend(outgoing, peer))
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

    def _told(self, work: dist.Work | None) -> None:
        """Wait for words between the processes; they go by gloo whatever the device is."""
        assert work is not None
        work.wait(self.timeout)

    def _sent(self, work: dist.Work | None) -> None:
        """Wait for what is measured; on a GPU only what comes next on it waits."""
        assert work is not None
        if self.on_gpu:
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
        """Failures inside are failures to reach `whom`."""
        try:
            yield
        except RuntimeError as error:
            text = " ".join(str(error).split())
            if "timed out" in text.lower() or "timeout" in text.lower():
                why = f"nothing came for {self.timeout.total_seconds():g} s"
            elif any(word in text for word in ("closed", "reset", "Broken pipe")):
                why = "it is gone"
            else:
                why = text[:200]
            raise PeerError(f"process {self.rank}: waiting for {whom}: {why}") from error
