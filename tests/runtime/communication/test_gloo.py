"""Sending threads: they hold a tensor until it is gone, and hold the sender back when asked."""

from __future__ import annotations

import threading
import time

from timeprest.runtime.communication.channel import SendingThread


class Work:
    """A send of 16 bytes that is done when its receiver says so."""

    def __init__(self, error=None):
        self.taken = threading.Event()
        self.error = error

    def __call__(self):
        assert self.taken.wait(10)
        if self.error:
            raise self.error


def test_a_sender_is_held_back_until_messages_are_taken():
    sender = SendingThread(0.5)
    works = [Work() for _ in range(3)]
    for work in works:
        sender.put(work, 16)
    assert sender.pending_bytes == 48
    assert not sender.wait_for(2)
    works[0].taken.set()
    assert sender.wait_for(2)
    assert sender.pending_bytes == 32
    for work in works:
        work.taken.set()
    assert sender.wait_for(0)
    assert sender.pending_bytes == 0
    sender.end()
    assert not sender._thread.is_alive()


def test_a_failed_send_is_told_at_once():
    sender = SendingThread(10)
    work = Work(RuntimeError("Connection closed by peer"))
    sender.put(work, 16)
    work.taken.set()
    begin = time.monotonic()
    assert not sender.wait_for(0)
    assert time.monotonic() - begin < 5
    assert "closed" in str(sender.error)
