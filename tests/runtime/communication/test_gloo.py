"""Sending threads: they hold a tensor until it is gone, and hold the sender back when asked. And
what gloo gets to send."""

from __future__ import annotations

import threading
import time

import torch
from timeprest.planner.systems.operations import FORWARD
from timeprest.profiles.tracing.shapes import ValueSpec
from timeprest.runtime.communication import gloo
from timeprest.runtime.communication.channel import SendingThread
from timeprest.runtime.prepare.messages import MessageRoute
from timeprest.runtime.prepare.workers import Replica


class Done:
    """A send that is gone."""

    def wait(self, timeout):
        return True


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


def test_conjugates_are_sent_as_what_they_are(monkeypatch):
    """Not as the memory that torch computes them from, which gloo doesn't take for them."""
    sent = []
    monkeypatch.setattr(gloo.dist, "isend", lambda tensor, *_, **__: sent.append(tensor) or Done())
    spec = ValueSpec("t", "tensor", (1,), torch.complex64, True)
    channels = gloo.GlooChannels(("stage 0", "stage 1"), 1.0)
    conjugate = torch.tensor([1.0 + 2.0j]).conj()
    channels.send(
        MessageRoute(0, spec, Replica(0, 0, 0), Replica(1, 1, 1), (0,), 1), FORWARD, conjugate
    )
    channels.end()
    assert torch.view_as_real(sent[0]).tolist() == [[1.0, -2.0]]
