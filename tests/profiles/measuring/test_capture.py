"""What captures on a GPU, held against a stand-in for torch's interface to one."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from timeprest.profiles.measuring import capture

ATEN = torch.ops.aten


class Card:
    """What a process knows of its card, as torch 2.11 does: a capture that CUDA breaks off is one
    that neither torch's allocator nor its generator has seen the end of."""

    def __init__(self):
        self.streams = ["default"]
        self.waits = []
        self.capturing = self.broken = self.draws = False
        self.pools = []

    def refuse(self):
        """Somebody waits for the stream."""
        self.broken = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def draw(self):
        if self.draws and not self.capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def end_pool(self, device, pool):
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)


class Stream:
    def __init__(self, card, name):
        self.card, self.name = card, name

    def wait_stream(self, other):
        self.card.waits.append((self.name, other.name))


@pytest.fixture
def card(monkeypatch):
    card = Card()

    class Graph:
        def capture_begin(self, pool=None, capture_error_mode="global"):
            assert capture_error_mode == "thread_local"
            assert card.streams[-1] == "side"
            assert not card.capturing
            self.pool = pool
            card.pools.append(pool)
            card.capturing = card.draws = True

        def capture_end(self):
            if not card.capturing:
                raise RuntimeError("CUDA error: the stream is not capturing")
            card.capturing = False
            if card.broken:
                card.broken = False
                raise RuntimeError("CUDA error: operation failed due to a previous error")
            card.pools.remove(self.pool)
            card.draws = False

    @contextmanager
    def stream(of):
        card.streams.append(of.name)
        try:
            yield
        finally:
            card.streams.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(card, "side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(card, "default"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", card.end_pool, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: None, raising=False)
    return card


@pytest.mark.parametrize("how", ["broken off", "refused", "good"])
def test_torch_goes_on_after_a_capture(how, card):
    on = capture.Capture(torch.device("cpu"))

    def work():
        with on.of(on.pool()):
            card.draw()
            if how == "broken off":
                card.refuse()
            if how == "refused":
                torch.ones(2).sum().item()

    if how == "good":
        work()
    else:
        with pytest.raises((RuntimeError, capture.CannotCaptureError)):
            work()
    card.draw()
    assert not card.pools
    assert card.streams == ["default"]
    # What was handed in before it came to nothing is waited for.
    assert card.waits == [("side", "default"), ("default", "side")]


class Attention:
    """Torch's, as it is on a card: the seed is kept on the host."""

    overloadpacket, tags = ATEN._scaled_dot_product_efficient_attention, ()

    def __init__(self, name):
        self.name = name

    def __str__(self):
        return self.name

    def __call__(self, *given):
        return given[0], torch.zeros((), dtype=torch.int64)


def test_attention_may_keep_its_seeds_on_the_host():
    device = torch.device("meta")
    mode, given = capture.Capturable(device), (torch.empty(2, device=device),)
    for kind in ("flash", "efficient", "cudnn"):
        name = f"aten._scaled_dot_product_{kind}_attention.default"
        made = mode.__torch_dispatch__(Attention(name), (), given)
        kept = (made[0], mode.__torch_dispatch__(ATEN.detach.default, (), made[1:]))
        mode.__torch_dispatch__(Attention(name.replace(".default", "_backward.default")), (), kept)
    for name in ("aten.where.self", "mine.flash_attention.default"):
        with pytest.raises(capture.CannotCaptureError, match="a tensor of the cpu"):
            mode.__torch_dispatch__(Attention(name), (), given)
    with pytest.raises(capture.CannotCaptureError, match="a tensor of the cpu"):
        mode.__torch_dispatch__(Attention("aten._flash_attention_forward"), (), (torch.ones(2),))
