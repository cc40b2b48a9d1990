"""Entries of a store that others can reach: what they write there is told from the run's own."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from timeprest.runtime.communication.signed_store import ForeignEntryError, Secret, SignedStore

SHORT = timedelta(seconds=20)


def test_who_has_the_secret_reads_what_was_written():
    under = dist.HashStore()
    mine, other = (SignedStore(under, Secret(b"ours")).below("run") for _ in range(2))
    for value in (b"", b"\0\xff", "text"):
        mine.set("key", value)
        other.wait(["key"], SHORT)
        assert other.check(["key"])
        assert other.get("key") == (value.encode() if isinstance(value, str) else value)
    assert [mine.add("count", 2), other.add("count", 0)] == [2, 2]
    assert other.delete_key("key")
    assert not mine.check(["key"])


def by_hand(under, mine):
    under.set("run/b", b"forged")


def too_short(under, mine):
    under.set("run/b", b"")


def of_another_entry(under, mine):
    """Read there, and written elsewhere."""
    mine.set("a", b"genuine")
    under.set("run/b", under.get("run/a"))


def of_another_secret(under, mine):
    SignedStore(under, Secret(b"theirs")).below("run").set("b", b"forged")


def of_a_secret_before(under, mine):
    secret = Secret(b"ours").derived("attempt 0")
    SignedStore(under, secret).below("run").set("b", b"old")


@pytest.mark.parametrize(
    "forge", [by_hand, too_short, of_another_entry, of_another_secret, of_a_secret_before]
)
def test_what_somebody_else_wrote_is_refused_in_a_line(forge):
    under = dist.HashStore()
    mine = SignedStore(under, Secret(b"ours")).below("run")
    forge(under, mine)
    with pytest.raises(ForeignEntryError, match="'run/b' in the run's store has no signature") as e:
        mine.get("b")
    assert "\n" not in str(e.value)


def group(store, rank, found):
    try:
        found[rank] = dist.ProcessGroupGloo(store.below("gloo"), rank, 2, SHORT)
    except ForeignEntryError as error:
        found[rank] = error


@pytest.mark.parametrize("forged", [False, True])
def test_gloo_takes_addresses_from_the_workers_alone(forged):
    under, found = dist.HashStore(), {}
    store = SignedStore(under, Secret(b"ours"))
    if forged:
        # Where it listens, and whom it sends to, is told there.
        under.set("gloo/0/1", b"elsewhere")
        group(store, 0, found)
        assert isinstance(found[0], ForeignEntryError)
        return
    threads = [threading.Thread(target=group, args=(store, rank, found)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sums = [torch.ones(2), torch.ones(2)]
    works = [found[rank].allreduce([sums[rank]]) for rank in (0, 1)]
    for work in works:
        work.wait(SHORT)
    assert all(torch.equal(each, torch.full((2,), 2.0)) for each in sums)
