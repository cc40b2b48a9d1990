"""Slots in a GPU's memory, into which another process of the host copies: CUDA IPC.

The receiver has the memory, from a plain ``cuMemAlloc`` (what torch's allocator has may be of
segments whose handles other processes can't open), and tells its handle once. The sender copies a
message there on a stream of its own, behind what makes it. Two events for each slot, which both
processes know, say when it is full and when it is empty: streams wait for them, and the host for
nothing. That a copy has been handed in goes over the socket that slots in shared memory have, too.

So nothing waits on the device but for what was handed in before it: a card that waits for all that
it has can't stand still. The two GPUs may be one.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...profiles.errors import RunError
from .shared_memory import SlotEnds
from .signed_store import SignedStore
from .slots import SLOT_BYTES, Box, Part, aligned

HANDLE_BYTES = 64
"""Of a handle of memory, and of an event's."""

_BLOCK_BYTES = 2 * 2**20
"""What the driver hands out smaller memory of."""

_PEER_ACCESS = 1
"""cuIpcOpenMemHandle: have this GPU reach the other's memory."""


class CudaIpcError(RunError):
    """What is needed can't be had here."""


# CUDA's driver ----------------------------------------------------------------------------------


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * HANDLE_BYTES),)


class _Driver:
    """The calls of CUDA's driver for which torch has none. For threads of this process's GPU."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaIpcError(f"CUDA's driver can't be loaded: {error}") from None
        torch.cuda.current_stream().synchronize()
        self._context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown").decode()
            raise CudaIpcError(f"{name}: {reason} (CUDA error {code})")

    def here(self) -> None:
        """Have this thread use the process's GPU."""
        self._call("cuCtxSetCurrent", self._context)

    def allocate(self, nbytes: int) -> int:
        """Address of new memory, in blocks of its own: a handle shares whole ones."""
        address = ctypes.c_uint64()
        whole = -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(whole))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, address: int) -> bytes:
        """By which another process opens the memory."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        """Address, in this process, of another one's memory."""
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_PEER_ACCESS),
        )
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy(self, target: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> None:
        self._call(
            "cuMemcpyAsync",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(stream.cuda_stream),
        )


# Slots ------------------------------------------------------------------------------------------

Events = list[list[torch.cuda.Event]]
"""One for each slot, by box."""


def _events_bytes(layout: Sequence[Box]) -> int:
    """Of what is told of one side's events."""
    return HANDLE_BYTES * sum(box.slots for box in layout)


class _DeviceSlots:
    """What both ends have of one direction."""

    def __init__(self, layout: Sequence[Box], device: torch.device) -> None:
        self.device = device
        self.layout = layout
        self.driver = _Driver()
        self.own: Events = [
            [torch.cuda.Event(interprocess=True) for _ in range(b.slots)] for b in layout
        ]
        self.others: Events = []
        self.address = 0

    def told(self) -> bytes:
        """Of this side's events, for the other."""
        with torch.cuda.device(self.device):
            return b"".join(bytes(event.ipc_handle()) for of_box in self.own for event in of_box)

    def know(self, told: bytes) -> None:
        handles = iter(told[k : k + HANDLE_BYTES] for k in range(0, len(told), HANDLE_BYTES))
        self.others = [
            [torch.cuda.Event.from_ipc_handle(self.device, next(handles)) for _ in range(b.slots)]
            for b in self.layout
        ]

    def at(self, k: int, slot: int) -> int:
        box = self.layout[k]
        return self.address + box.offset + slot * aligned(box.nbytes)

    def parts(self, k: int, message: Tensor) -> list[Part]:
        """A whole message, and the moment at which it is ready."""
        message = message.detach().contiguous().resolve_conj()
        return [(message, torch.cuda.current_stream(self.device).record_event())]


class ReceivingSlots(_DeviceSlots):
    """The receiver's end, which has the memory."""

    lent = True

    def __init__(self, layout: Sequence[Box], device: torch.device) -> None:
        super().__init__(layout, device)
        self.address = self.driver.allocate(layout[-1].end)

    def take(self, k: int, slot: int) -> Tensor:
        """The message; what is computed from now on comes behind its copy."""
        box, stream = self.layout[k], torch.cuda.current_stream(self.device)
        stream.wait_event(self.others[k][slot])
        message = torch.empty(box.shape, dtype=box.dtype, device=self.device)
        if message.numel():
            self.driver.copy(message.data_ptr(), self.at(k, slot), message.nbytes, stream)
        self.own[k][slot].record(stream)
        return message

    def bytes_of(self, k: int, slot: int) -> Tensor:
        """Messages don't say their shapes here."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the memory back, when the sender is through."""
        self.driver.free(self.address)


class SendingSlots(_DeviceSlots):
    """The sender's end."""

    def __init__(self, layout: Sequence[Box], device: torch.device) -> None:
        super().__init__(layout, device)
        self._used: set[tuple[int, int]] = set()
        self._stream = torch.cuda.Stream(device)

    def put(self, k: int, slot: int, part: Part) -> None:
        """Copy a message there, behind what makes it, and what was there has been taken."""
        message, ready = part
        self.driver.here()
        stream = self._stream
        stream.wait_event(ready)
        if (k, slot) in self._used:
            stream.wait_event(self.others[k][slot])
        self._used.add((k, slot))
        if message.numel():
            self.driver.copy(self.at(k, slot), message.data_ptr(), message.nbytes, stream)
        # Its memory mustn't be given away before.
        message.record_stream(stream)
        self.own[k][slot].record(stream)

    def close(self) -> None:
        """Be done with the receiver's memory."""
        self._stream.synchronize()
        self.driver.close(self.address)


class GpuMemory(SlotEnds[SendingSlots]):
    """Slots in the receiver's GPU."""

    slot_bytes = 8 * SLOT_BYTES
    """With two slots of 1 MiB each message waited for one that came back: 168 µs on an H100, where
    one of many slots took 68."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, connection: socket.socket, layout: Sequence[Box]) -> SendingSlots:
        """Tell of the events that say that slots are full."""
        slots = SendingSlots(layout, self._device)
        connection.sendall(slots.told())
        return slots

    def offer(self, connection: socket.socket, layout: Sequence[Box]) -> ReceivingSlots:
        """Tell of the memory, and of the events that say that slots are empty."""
        slots = ReceivingSlots(layout, self._device)
        slots.know(_received(connection, _events_bytes(layout)))
        connection.sendall(slots.driver.handle(slots.address) + slots.told())
        return slots

    def adopt(self, connection: socket.socket, begun: SendingSlots) -> SendingSlots:
        """Reach the memory."""
        told = _received(connection, HANDLE_BYTES + _events_bytes(begun.layout))
        begun.address = begun.driver.open(told[:HANDLE_BYTES])
        begun.know(told[HANDLE_BYTES:])
        return begun


def _received(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            raise ConnectionError("closed by the other process")
        found += more
    return found


# Whether it can be had --------------------------------------------------------------------------

_PATTERN = 4096
_REACHED = "reached"


class _Probe:
    """A little memory for each other worker, and an event, which those that send here reach for."""

    def __init__(self, device: torch.device) -> None:
        self.driver = _Driver()
        self.address = self.driver.allocate(_PATTERN * dist.get_world_size())
        self.event = torch.cuda.Event(interprocess=True)
        with torch.cuda.device(device):
            self.told = self.driver.handle(self.address) + bytes(self.event.ipc_handle())


def _reach(told: bytes, rank: int, device: torch.device) -> None:
    """Write to another worker's memory and read it back, behind its event. Raises CudaIpcError."""
    driver, stream = _Driver(), torch.cuda.current_stream(device)
    stream.wait_event(torch.cuda.Event.from_ipc_handle(device, told[HANDLE_BYTES:]))
    address = driver.open(told[:HANDLE_BYTES])
    sent = torch.randint(0, 255, (_PATTERN,), dtype=torch.uint8, device=device)
    back = torch.zeros_like(sent)
    driver.copy(address + rank * _PATTERN, sent.data_ptr(), _PATTERN, stream)
    driver.copy(back.data_ptr(), address + rank * _PATTERN, _PATTERN, stream)
    same = torch.equal(sent, back)
    driver.close(address)
    if not same:
        raise CudaIpcError("what was written to another GPU's memory didn't arrive")


def why_not(
    rank: int,
    targets: Sequence[int],
    device: torch.device,
    store: SignedStore,
    timeout_s: float,
) -> str:
    """Why some worker can't reach another one's memory; empty: all can.

    All workers ask together, and all get the same answer.

    Args:
        targets: ranks of those that it sends to.
        store: of all workers, in which handles are told.
    """
    probe, reason = None, ""
    try:
        probe = _Probe(device)
    except (RuntimeError, CudaIpcError) as error:
        reason = " ".join(str(error).split())[:200]
    store.set(f"cuda ipc/{rank}", probe.told if probe else b"none")
    for target in targets:
        key = f"cuda ipc/{target}"
        store.wait([key], timedelta(seconds=timeout_s))
        told = bytes(store.get(key))
        if len(told) != 2 * HANDLE_BYTES:
            continue
        try:
            _reach(told, rank, device)
        except (RuntimeError, CudaIpcError) as error:
            reason = reason or " ".join(str(error).split())[:200]
    # Nobody gives back what another one may still reach for.
    store.set(f"cuda ipc/{rank}/reached", reason or _REACHED)
    keys = [f"cuda ipc/{other}/reached" for other in range(dist.get_world_size())]
    store.wait(keys, timedelta(seconds=timeout_s))
    if probe is not None:
        torch.cuda.synchronize(device)
        probe.driver.free(probe.address)
    reasons = [bytes(store.get(key)).decode() for key in keys]
    return next((found for found in reasons if found != _REACHED), "")
