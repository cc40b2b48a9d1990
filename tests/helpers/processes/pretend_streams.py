"""Streams and events that are no GPU's: what is handed in runs late, in any sequence it may."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
from collections import deque

import torch
from timeprest.runtime.communication import cuda_ipc


class PretendGpu:
    """Memory, streams and events of two workers, who are threads of this process.

    Attributes:
        worker: the one that computes now.
        memory: of slots, and of tensors that streams were told of.
        kept: where it begins, and how long it is: what copies may read.
        closed: addresses of memory that nobody writes to any more.
    """

    def __init__(self, seed):
        self.worker = 0
        self.draw = random.Random(seed)
        self.streams = []
        self.events = {}
        self.kept, self.memory = [], []
        self.closed = set()
        self.numbers = itertools.count(1)

    def run(self):
        """Run all that was handed in: at every step the head of some stream that needn't wait."""
        while any(stream.queue for stream in self.streams):
            able = [s for s in self.streams if s.queue and s.queue[0][0]()]
            assert able, "streams wait for each other"
            self.draw.choice(able).queue.popleft()[1]()


class Stream:
    def __init__(self, gpu):
        self.queue = deque()
        self.cuda_stream = self
        gpu.streams.append(self)
        self.gpu = gpu

    def put(self, does, may=lambda: True):
        self.queue.append((may, does))

    def wait_event(self, event):
        wanted = event.recorded
        self.put(lambda: None, lambda: event.reached >= wanted)

    def record_event(self):
        event = Event(self.gpu)
        event.record(self)
        return event

    def synchronize(self):
        self.gpu.run()


class Event:
    def __init__(self, gpu):
        self.recorded = self.reached = 0
        self.name = next(gpu.numbers)
        gpu.events[self.name] = self

    def record(self, stream):
        self.recorded += 1
        now = self.recorded
        stream.put(lambda: setattr(self, "reached", now))

    def ipc_handle(self):
        return self.name.to_bytes(cuda_ipc.HANDLE_BYTES, "little")


def pretend(monkeypatch, seed=0):
    """Have `cuda_ipc` work without a GPU. Returns what runs the work."""
    gpu = PretendGpu(seed)
    computing = {}

    def within(address, nbytes):
        """Where memory that is kept begins, of which this is a part."""
        for begin, length in gpu.kept:
            if begin <= address and address + nbytes <= begin + length:
                return begin
        return None

    class Driver:
        def here(self):
            pass

        def allocate(self, nbytes):
            memory = ctypes.create_string_buffer(nbytes)
            gpu.memory.append(memory)
            gpu.kept.append((ctypes.addressof(memory), nbytes))
            return ctypes.addressof(memory)

        def free(self, address):
            pass

        def handle(self, address):
            return address.to_bytes(cuda_ipc.HANDLE_BYTES, "little")

        def open(self, handle):
            return int.from_bytes(handle, "little")

        def close(self, address):
            gpu.closed.add(address)

        def copy(self, target, source, nbytes, stream):
            def does():
                assert within(source, nbytes) is not None, "this may have been let go"
                assert within(target, nbytes) not in gpu.closed, "this is closed"
                ctypes.memmove(target, source, nbytes)

            stream.put(does)

    def current(device=None):
        if gpu.worker not in computing:
            computing[gpu.worker] = Stream(gpu)
        return computing[gpu.worker]

    class Events:
        def __new__(cls, interprocess):
            return Event(gpu)

        @staticmethod
        def from_ipc_handle(device, handle):
            return gpu.events[int.from_bytes(handle, "little")]

    monkeypatch.setattr(cuda_ipc, "_Driver", Driver)
    monkeypatch.setattr(torch.cuda, "Event", Events)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(gpu))
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def record_stream(tensor, stream):
        gpu.memory.append(tensor)
        gpu.kept.append((tensor.data_ptr(), tensor.nbytes))

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return gpu
