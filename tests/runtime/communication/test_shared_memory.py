"""Messages through shared memory, between two workers that are threads here."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from timeprest.planner.systems.operations import BACKWARD, FORWARD
from timeprest.profiles.errors import UserError
from timeprest.profiles.tracing.shapes import ValueSpec
from timeprest.runtime.communication import shared_memory, signed_store, transport
from timeprest.runtime.communication.channel import PeerError
from timeprest.runtime.communication.shared_memory import GoneError, _records, connect
from timeprest.runtime.communication.signed_store import ForeignEntryError, Secret, SignedStore
from timeprest.runtime.communication.slots import MOST_SLOTS, SLOT_BYTES, boxes
from timeprest.runtime.communication.transport import GLOO, NCCL, SHARED
from timeprest.runtime.prepare.messages import MessageRoute, message_series
from timeprest.runtime.prepare.workers import Replica

LARGE = (SLOT_BYTES // 4, 2)
"""Shape whose messages have no slots but those posted ahead."""


def route(number=0, shape=(2, 3), dtype=torch.float32, needs_grad=True):
    spec = ValueSpec(f"t{number}", "tensor", tuple(shape), dtype, needs_grad)
    return MessageRoute(number, spec, Replica(0, 0, 0), Replica(1, 1, 1), (0,), 1)


def both(*routes, timeout_s=5.0, count=1000, **how):
    """The channels of workers 0 and 1, open for many messages of each route."""
    store, found = SignedStore(dist.HashStore(), Secret(b"ours")), {}

    def join(rank):
        names = ("stage 0", "stage 1")
        found[rank] = connect(rank, names, routes, store, timeout_s=timeout_s, **how)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found[1].open([message_series(FORWARD, [[c]], count) for c in routes])
    found[0].open([message_series(BACKWARD, [[c]], count) for c in routes if c.spec.needs_grad])
    return found[0], found[1]


def message(c, k, kind=FORWARD):
    return torch.full(c.shape(kind), k).to(c.spec.dtype)


@pytest.mark.parametrize(
    "c",
    [
        route(),
        route(shape=LARGE),
        route(shape=(), dtype=torch.int64, needs_grad=False),
        route(shape=(0, 3)),
        route(shape=(5,), dtype=torch.bool, needs_grad=False),
        route(shape=(3, 5), dtype=torch.bfloat16),
    ],
)
def test_messages_come_in_sequence_however_many_wait(c):
    source, target = both(c)
    count = 3 if c.shape(FORWARD) == LARGE else 2 * MOST_SLOTS + 5
    for _ in range(2):
        for k in range(count):
            source.send(c, FORWARD, message(c, k))
        for k in range(count):
            got = target.receive(c, FORWARD)
            assert got.dtype == c.spec.dtype
            assert torch.equal(got, message(c, k))
        source.close()
    source.end()
    target.end()


@pytest.mark.parametrize(
    "c",
    [
        route(),
        route(shape=LARGE),
        route(shape=(), dtype=torch.int64, needs_grad=False),
        route(shape=(3, 5), dtype=torch.bfloat16),
        route(shape=(3, 5), dtype=torch.complex64),
    ],
)
def test_messages_say_their_shapes(c):
    """Smaller and larger ones than the slots are for, also before any is taken."""
    source, target = both(c, varying=True)
    generator = torch.Generator().manual_seed(0)
    rank = len(c.spec.shape)
    shapes = [c.spec.shape, *(shape[:rank] for shape in ((1, 1), (0, 0), (7, 3), (400, 9)))]
    if c.spec.shape == LARGE:
        shapes = [(SLOT_BYTES, 3), (1, 1), (SLOT_BYTES // 4, 3)]
    sent = [torch.randn(s, generator=generator).mul(99).to(c.spec.dtype).conj() for s in shapes]
    for _ in range(2):
        for tensor in (*sent, *sent):
            source.send(c, FORWARD, tensor.t() if rank > 1 else tensor)
        for tensor in (*sent, *sent):
            got = target.receive(c, FORWARD)
            assert got.dtype == c.spec.dtype
            assert torch.equal(got, tensor.t() if rank > 1 else tensor)
        source.close()
    source.end()
    target.end()


def test_both_directions_and_several_tensors_keep_apart():
    first, second = route(0), route(1, shape=(4,))
    source, target = both(first, second)
    for k in range(10):
        source.send(second, FORWARD, message(second, k))
        source.send(first, FORWARD, message(first, -k))
        target.send(first, BACKWARD, message(first, 10 * k, BACKWARD))
        assert torch.equal(target.receive(first, FORWARD), message(first, -k))
        assert torch.equal(target.receive(second, FORWARD), message(second, k))
        assert torch.equal(source.receive(first, BACKWARD), message(first, 10 * k, BACKWARD))


def test_what_is_sent_and_received_may_change_afterwards():
    c = route()
    source, target = both(c)
    across = torch.arange(6.0).view(3, 2).t()
    expected = across.clone()
    source.send(c, FORWARD, across)
    across.zero_()
    got = target.receive(c, FORWARD)
    source.send(c, FORWARD, expected)
    got.zero_()
    assert torch.equal(target.receive(c, FORWARD), expected)


def test_messages_beyond_the_posted_ones_count_where_they_come_from():
    c = route(shape=LARGE)
    source, target = both(c)
    nbytes = c.nbytes(FORWARD)
    assert (target.held_bytes, source.held_bytes) == (2 * nbytes, nbytes)
    for k in range(4):
        source.send(c, FORWARD, message(c, k))
    source.send(c, FORWARD, message(c, 4), kept=True)
    assert source.held_bytes == nbytes + 2 * nbytes
    for k in range(5):
        assert torch.equal(target.receive(c, FORWARD), message(c, k))
    source.close()
    assert (target.held_bytes, source.held_bytes) == (2 * nbytes, nbytes)


def test_nobody_looks_for_less_than_nothing_held(monkeypatch):
    """A look is a system call, and the account asks after every operation."""
    c = route(needs_grad=False)
    source, target = both(c)
    source.send(c, FORWARD, message(c, 1))
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "_records", lambda _: pytest.fail("it has looked"))
        assert source.held_bytes == 0
    target.receive(c, FORWARD)
    source.close()
    source.end()
    target.end()


def test_small_messages_have_slots_of_their_own():
    (small,), (large,) = (boxes([route(shape=s)], 0, 1) for s in ((2, 3), LARGE))
    assert (small.slots, large.slots) == (MOST_SLOTS, 2)
    assert [box.key for box in boxes([route()], 1, 0)] == [(0, BACKWARD)]
    assert boxes([route(needs_grad=False)], 1, 0) == ()


def test_many_tensors_wait_for_a_receiver_that_is_busy():
    """There are more messages than the socket holds records."""
    routes = [route(number) for number in range(6)]
    source, target = both(*routes)
    for k in range(MOST_SLOTS):
        for c in routes:
            source.send(c, FORWARD, message(c, k))
    for k in range(MOST_SLOTS):
        for c in routes:
            assert torch.equal(target.receive(c, FORWARD), message(c, k))


def test_a_sender_waits_where_it_is_asked_to():
    c = route()
    source, target = both(c, timeout_s=0.1)
    for k in range(3):
        source.send(c, FORWARD, message(c, k))
    source.throttle(3)
    with pytest.raises(PeerError, match=r"stage 1: nothing came for 0\.1 s"):
        source.throttle(2)
    target.receive(c, FORWARD)
    source.throttle(2)


@pytest.mark.parametrize(("rows", "parts"), [(2, 1), (20, 3), (100, 10)])
def test_a_sender_waits_for_messages_and_not_for_their_parts(rows, parts):
    """Of a message in several slots, each comes back: it is one message that was taken."""
    c = route()
    source, target = both(c, timeout_s=0.1, varying=True)
    (outbox,) = source._outboxes.values()
    sent = [torch.full((rows, 3), float(k)) for k in range(3)]
    assert len(outbox._layout[0].parts(sent[0])) == parts
    for tensor in sent:
        source.send(c, FORWARD, tensor)
    for left, tensor in zip((3, 2, 1), sent, strict=True):
        source.throttle(left)
        with pytest.raises(PeerError, match="stage 1: nothing came"):
            source.throttle(left - 1)
        assert torch.equal(target.receive(c, FORWARD), tensor)
    source.throttle(0)
    # Part by part: it is taken with its last.
    (inbox,) = target._inboxes.values()
    source.send(c, FORWARD, sent[0])
    for left in range(parts - 1, -1, -1):
        inbox.wait(inbox._layout[0].key, 5.0)
        inbox._give_back(0, inbox._come[0].popleft())
        if left:
            with pytest.raises(PeerError, match="stage 1: nothing came"):
                source.throttle(0)
    source.throttle(0)


def test_a_record_that_the_thread_takes_is_not_waited_for(monkeypatch):
    """Just after the sender has looked, and just before it waits."""
    c = route(shape=LARGE)
    source, target = both(c, timeout_s=2.0)
    for k in range(MOST_SLOTS + 1):
        source.send(c, FORWARD, message(c, k))
    (outbox,) = source._outboxes.values()
    assert outbox._thread is not None
    for _ in range(MOST_SLOTS):
        target.receive(c, FORWARD)
    source.throttle(1)
    before = shared_memory._wait

    def taken_meanwhile(connection, deadline):
        if threading.current_thread() is threading.main_thread():
            monkeypatch.setattr(shared_memory, "_wait", before)
            target.receive(c, FORWARD)
            with outbox._lock:
                outbox._take_back()
        before(connection, deadline)

    monkeypatch.setattr(shared_memory, "_wait", taken_meanwhile)
    source.throttle(0)


def test_a_thread_that_waits_for_a_record_that_was_taken_ends_at_once(monkeypatch):
    c = route(shape=LARGE)
    source, target = both(c, timeout_s=30.0)
    real, goes_on, waits = shared_memory._wait, threading.Event(), threading.Event()

    def late(connection, deadline):
        if threading.current_thread() is not threading.main_thread():
            goes_on.wait(5)
            waits.set()
        real(connection, deadline)

    monkeypatch.setattr(shared_memory, "_wait", late)
    for k in range(3):
        source.send(c, FORWARD, message(c, k))
    target.receive(c, FORWARD)
    source.throttle(2)
    for _ in range(2):
        target.receive(c, FORWARD)
    source.throttle(0)
    goes_on.set()
    assert waits.wait(5)
    time.sleep(0.1)
    begin = time.monotonic()
    source.end()
    assert time.monotonic() - begin < 10


def test_a_receiver_waits_no_longer_than_the_bound():
    c = route()
    _, target = both(c, timeout_s=0.1)
    with pytest.raises(PeerError, match=r"stage 0: nothing came for 0\.1 s"):
        target.receive(c, FORWARD)


def test_a_bound_may_be_longer_than_the_system_counts():
    here, there = socket.socketpair()
    with here, there:
        there.send(b"1")
        shared_memory._wait(here, time.monotonic() + 1e9)


def test_a_worker_that_ends_is_noticed_at_once():
    c = route(shape=LARGE)
    source, target = both(c)
    source.send(c, FORWARD, message(c, 7))
    source.end()
    begin = time.monotonic()
    # What it had sent is still there.
    assert torch.equal(target.receive(c, FORWARD), message(c, 7))
    with pytest.raises(PeerError, match="stage 0: it is gone"):
        target.receive(c, FORWARD)
    assert time.monotonic() - begin < 3


def test_a_record_that_breaks_off_is_no_wait_without_end():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.send(b"\0\0\0")
    theirs.close()
    with ours, pytest.raises(GoneError):
        _records(ours)


def test_messages_that_wait_are_lost_with_their_receiver():
    c = route(shape=LARGE)
    source, target = both(c)
    for k in range(3):
        source.send(c, FORWARD, message(c, k))
    target.end()
    with pytest.raises(PeerError, match="stage 1: it is gone"):
        source.close()
    assert source.held_bytes >= 0


def test_slots_that_the_computing_thread_has_seen_come_back_arent_waited_for(monkeypatch):
    """By the thread that sends, which had begun to wait for them."""
    c, wait = route(shape=LARGE), shared_memory._wait
    looks, goes_on = threading.Event(), threading.Event()

    def sees_nothing(connection, deadline):
        if threading.current_thread() is threading.main_thread():
            return wait(connection, deadline)
        looks.set()
        goes_on.wait(5)
        raise TimeoutError

    monkeypatch.setattr(shared_memory, "_wait", sees_nothing)
    source, target = both(c)
    (outbox,) = source._outboxes.values()
    (box,) = outbox._layout
    for k in range(box.slots + 1):
        source.send(c, FORWARD, message(c, k))
    assert looks.wait(5)
    for k in range(box.slots + 1):
        assert torch.equal(target.receive(c, FORWARD), message(c, k))
        assert source.held_bytes >= 0
    goes_on.set()
    outbox._thread.join(0.2)
    source.send(c, FORWARD, message(c, 0))
    source.end()
    target.end()


def test_nothing_stays_behind_in_the_file_system():
    before = set(Path(tempfile.gettempdir()).glob("timeprest-*/in"))
    source, target = both(route())
    assert set(Path(tempfile.gettempdir()).glob("timeprest-*/in")) <= before
    source.end()
    target.end()


def test_a_long_name_of_the_folder_for_temporary_files(tmp_path, monkeypatch):
    """A socket's name has 107 bytes at most."""
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    c = route()
    source, target = both(c)
    source.send(c, FORWARD, message(c, 3))
    assert torch.equal(target.receive(c, FORWARD), message(c, 3))


def test_shared_memory_is_for_one_host_and_the_cpu():
    assert transport.between_processes(GLOO, "auto", one_host=True) == SHARED
    assert transport.between_processes(GLOO, "auto", one_host=False) == GLOO
    assert transport.between_processes(GLOO, "gloo", one_host=True) == GLOO
    for way, one_host, reason in ((GLOO, False, "several hosts"), (NCCL, True, "GPUs")):
        with pytest.raises(UserError, match=f"--transport shm: .*{reason}"):
            transport.between_processes(way, "shm", one_host=one_host)


def test_who_knows_no_secret_gets_no_memory_and_keeps_nobody_out():
    """Whoever calls first as one of the others is hung up on."""
    under, found = dist.HashStore(), []
    store = SignedStore(under, Secret(b"ours"))

    def join(rank):
        routes = [route(needs_grad=False)]
        found.append(connect(rank, ("stage 0", "stage 1"), routes, store, timeout_s=9.0))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (1, 0)]
    threads[0].start()
    address = store.get("shared memory/1").decode()
    for said in (b"", b"\0" * 4, b"\0" * signed_store._CALL.size):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(address)
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 2
    for channels in found:
        channels.end()


def test_no_other_users_process_is_called_or_heard(monkeypatch):
    store = SignedStore(dist.HashStore(), Secret(b"ours"))
    with shared_memory._listening(1, 5.0) as (listener, address):
        store.set("shared memory/1", address)
        monkeypatch.setattr(signed_store.os, "getuid", lambda: -1)
        with pytest.raises(ConnectionError, match="another user's process answers for rank 1"):
            shared_memory._call(store, 0, 1, 5.0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.connect(address)
            signature = store.secret.signature(signed_store._from_to(0, 1))
            listener.accept()
            connection, _ = listener.accept()
            caller.sendall(signed_store._CALL.pack(0, signature))
            assert store.secret.caller(connection, 1) is None
            monkeypatch.undo()
            store.secret.call(caller, 0, 1)
            assert store.secret.caller(connection, 1) == 0


def test_nobody_else_sends_a_worker_to_another_socket():
    under = dist.HashStore()
    under.set("shared memory/1", b"/tmp/elsewhere")
    with pytest.raises(ForeignEntryError, match="'shared memory/1' in the run's store has no sig"):
        shared_memory._call(SignedStore(under, Secret(b"ours")), 0, 1, 5.0)
