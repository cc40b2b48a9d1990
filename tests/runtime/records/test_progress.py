"""The metrics file of a long run: losses of all mini-batches, and figures of fewer and fewer."""

from __future__ import annotations

import itertools

import pytest
from timeprest.runtime.records import progress
from timeprest.runtime.records.progress import (
    MetricsFile,
    Observer,
    Tail,
    read_losses,
    read_progress,
)


class Told(Observer):
    """Notes what it is told."""

    def __init__(self):
        self.seen = []

    def mini_batch(self, epoch, done, of, loss, figures):
        self.seen.append((loss, figures or None))


def write(path, losses, more=False):
    file = MetricsFile(path, Observer(), more=more)
    for k, loss in enumerate(losses, start=1):
        file.mini_batch(0, k, len(losses), loss, {"seconds": 0.25, "number": loss})
        # As five times a second.
        file.flush()
    file.close()


def test_losses_are_kept_and_figures_thinned_as_the_file_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "FULL_BYTES", 4000)
    path, told = tmp_path / "metrics.jsonl", Told()
    tail = Tail(path, told)
    losses = [float(k) for k in range(2000)]
    write(path, losses)
    tail.poll()
    assert read_losses(path) == losses
    assert [loss for loss, _ in told.seen] == losses
    known = [loss for loss, figures in told.seen if figures is not None]
    # What it has is its own mini-batch's.
    assert all(f is None or f == {"seconds": 0.25, "number": loss} for loss, f in told.seen)
    gaps = [int(after - before) for before, after in itertools.pairwise(known)]
    assert gaps[:10] == [1] * 10
    assert max(gaps) >= 16
    assert len(known) < 400
    assert sum(len(line.losses) for line in read_progress(path)) == len(losses)


@pytest.mark.parametrize("more", [False, True])
def test_a_run_that_goes_on_knows_how_large_its_file_is(more, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "FULL_BYTES", 4000)
    path = tmp_path / "metrics.jsonl"
    write(path, [0.0] * 200)
    write(path, [1.0] * 10, more=more)
    lines = read_progress(path)
    with_figures = [line for line in lines if line.losses == [1.0] and line.figures[0]]
    assert len(with_figures) == (10 if not more else len(with_figures))
    assert not more or len(with_figures) < 5
