"""Sending threads: they hold a tensor until it is gone, and hold the sender back when asked."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch
from timeprest.runtime.communication.gloo import _Sender


class Work:
    """A send that is done when its receiver says so."""

    def __init__(self, error=None):
        self.taken = threading.Event()
        self.error = error

    def wait(self, timeout):
        assert self.taken.wait(timeout.total_seconds())
        if self.error:
            raise self.error


def test_a_sender_is_held_back_until_messages_are_taken():
    sender = _Sender(timedelta(seconds=10))
    works = [Work() for _ in range(3)]
    for work in works:
        sender.put(work, torch.zeros(4), 16)
    assert sender.pending_bytes == 48
    assert not sender.wait_for(2, timedelta(seconds=0.05))
    works[0].taken.set()
    assert sender.wait_for(2, timedelta(seconds=5))
    assert sender.pending_bytes == 32
    for work in works:
        work.taken.set()
    assert sender.wait_for(0, timedelta(seconds=5))
    assert sender.pending_bytes == 0
    sender.end(timedelta(seconds=5))
    assert not sender._thread.is_alive()


def test_a_failed_send_is_told_at_once():
    sender = _Sender(timedelta(seconds=10))
    work = Work(RuntimeError("Connection closed by peer"))
    sender.put(work, torch.zeros(4), 16)
    work.taken.set()
    begin = time.monotonic()
    assert not sender.wait_for(0, timedelta(seconds=10))
    assert time.monotonic() - begin < 5
    assert "closed" in str(sender.error)
