"""Messages by NCCL, posted to a device that is made up: when they go, what they hold, who waits."""

from __future__ import annotations

import pytest
import torch
from timeprest.planner.systems.operations import BACKWARD, FORWARD
from timeprest.profiles.tracing.shapes import ValueSpec
from timeprest.runtime.communication.channel import PeerError
from timeprest.runtime.communication.nccl import NcclChannels
from timeprest.runtime.communication.posts import Post
from timeprest.runtime.prepare.messages import MessageRoute
from timeprest.runtime.prepare.workers import Replica

ROUTE = MessageRoute(
    0,
    ValueSpec("t", "tensor", (2, 3), torch.float64, True),
    Replica(0, 0, 0),
    Replica(1, 1, 1),
    (0,),
    1,
)
NBYTES = 48


class Under:
    """A send or a receive under way."""

    def __init__(self, tensor, *, through):
        self.tensor, self.through, self.waited = tensor, through, False

    def is_completed(self):
        return self.through

    def wait(self):
        self.waited = True


class Poster:
    """Keeps what is posted; greetings are through at once."""

    def __init__(self):
        self.posted = []
        self.greets = True

    def ready(self, tensor):
        return None

    def send(self, tensor, ready, direction):
        self.posted.append(Under(tensor, through=self.greets))
        return self.posted[-1]

    def receive(self, buffer, direction):
        return self.send(buffer, None, direction)


def channels(rank, *posts, timeout_s=0.05):
    poster = Poster()
    made = NcclChannels(
        rank, ("stage 0", "stage 1"), [ROUTE], torch.device("cpu"), timeout_s, poster=poster
    )
    poster.posted.clear()
    poster.greets = False
    made.open([], lambda rank: [Post(after, ROUTE, kind) for after, kind in posts])
    return made, poster.posted


def message(number=1.0):
    return torch.full((2, 3), number, dtype=torch.float64)


def test_a_message_goes_behind_its_operation_in_every_segment():
    made, posted = channels(0, (1, FORWARD))
    for _ in range(2):
        made.send(ROUTE, FORWARD, message())
        assert not posted
        made.advance()
        assert len(posted) == 1
        made.advance()
        posted.pop().through = True
        made.open([], lambda rank: [Post(1, ROUTE, FORWARD)])


def test_what_is_held_until_it_has_gone():
    """What the backward keeps anyway doesn't count, but for a copy of it."""
    made, posted = channels(0, (1, FORWARD), (2, FORWARD), (3, FORWARD))
    made.send(ROUTE, FORWARD, message())
    assert made.held_bytes == NBYTES
    made.advance()
    assert made.held_bytes == NBYTES
    made.send(ROUTE, FORWARD, message(), kept=True)
    assert made.held_bytes == NBYTES
    made.advance()
    posted[0].through = posted[1].through = True
    # Who sends lets go of what has gone before.
    made.send(ROUTE, FORWARD, message().t().contiguous().t(), kept=True)
    assert made.held_bytes == NBYTES
    made.advance()
    assert posted[2].tensor.is_contiguous()
    posted[2].through = True
    made.close()
    assert made.held_bytes == 0


def test_who_has_too_much_under_way_waits_until_it_has_gone():
    made, posted = channels(0, (1, FORWARD), (2, FORWARD))
    for _ in range(2):
        made.send(ROUTE, FORWARD, message())
        made.advance()
    made.throttle(2)
    with pytest.raises(PeerError, match=r"waiting for stage 1: nothing came for 0\.05 s"):
        made.throttle(1)
    posted[0].through = True
    made.throttle(1)
    with pytest.raises(PeerError):
        made.close()


def test_what_was_received_comes_before_what_is_computed_from_it():
    made, posted = channels(1, (0, FORWARD), (0, FORWARD), (1, BACKWARD))
    assert made.held_bytes == 2 * NBYTES
    with pytest.raises(PeerError, match="waiting for stage 0"):
        made.receive(ROUTE, FORWARD)
    made, posted = channels(1, (0, FORWARD))
    posted[0].tensor.copy_(message(3.0))
    posted[0].through = True
    assert torch.equal(made.receive(ROUTE, FORWARD), message(3.0))
    assert posted[0].waited
    assert made.held_bytes == 0
    with pytest.raises(PeerError, match="stage 0 sends no more 't'"):
        made.receive(ROUTE, FORWARD)
