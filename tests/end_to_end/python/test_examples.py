"""The examples of the docs train, in 2 and 3 processes, as a plain PyTorch loop would."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from itertools import count, islice

import pytest
import timeprest
import torch
from helpers.paths import ROOT

sys.path.append(str(ROOT / "docs" / "examples"))

import nano_gpt


def plain_losses(task, steps, *, clip=None, dtype=None, seed=0):
    """A loop as one would write it without any pipeline."""
    torch.manual_seed(seed)
    model = task.model().train()
    optimizer = task.optimizer(model.parameters())
    schedule = task.scheduler(optimizer, steps, None) if hasattr(task, "scheduler") else None
    loader = task.data("train")

    def batches():
        for epoch in count():
            loader.sampler.set_epoch(epoch)
            yield from loader

    losses = []
    for inputs, target in islice(batches(), steps):
        with torch.autocast("cpu", dtype) if dtype else nullcontext():
            output = model(inputs)
        loss = task.loss(output, target)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.choice(0)
@pytest.mark.slow
@pytest.mark.processes
def test_the_image_classifier(tmp_path):
    """Over the end of an epoch of 22 mini-batches."""
    import image_classifier  # which loads scikit-learn

    words = ["--variant", "gpipe", "--stages", "3", "--steps", "24", "--seconds", "0"]
    run = image_classifier.main([*words, "--run-dir", str(tmp_path / "run")])
    assert run.plan.workers == 3
    assert run.losses == pytest.approx(plain_losses(image_classifier.Task(), 24), rel=1e-5)
    assert run.losses[-1] < 0.5 * run.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "precision"), [("pipedream-flush", 1e-5), ("timeprest", None)])
def test_the_small_gpt_inline(variant, precision, tmp_path, monkeypatch):
    """Without a flush, one device has both stages that use the embedding."""
    trained = timeprest.run
    monkeypatch.setattr(timeprest, "run", partial(trained, inline=True), raising=False)
    words = ["--variant", variant, "--steps", "12", "--autocast", "off", "--seconds", "0"]
    run = nano_gpt.main([*words, "--run-dir", str(tmp_path / "run")])
    if precision is not None:
        plain = plain_losses(nano_gpt.Task(), 12, clip=1.0)
        assert run.losses == pytest.approx(plain, rel=precision)
    else:
        # How many stages there are hangs on measured times.
        assert run.plan.placement[0] == run.plan.placement[-1]
        assert run.losses[-1] < run.losses[0]


@pytest.mark.choice(0)
@pytest.mark.slow
@pytest.mark.processes
def test_the_small_gpt(tmp_path):
    """With copies of the embedding."""
    words = ["--devices", "2", "--steps", "12", "--seconds", "0"]
    run = nano_gpt.main([*words, "--run-dir", str(tmp_path / "run")])
    assert run.plan.workers == 2
    assert run.plan.tied == "split"
    plain = plain_losses(nano_gpt.Task(), 12, clip=1.0, dtype=torch.bfloat16)
    # Micro-batches are rounded to bfloat16 each by itself.
    assert run.losses == pytest.approx(plain, rel=1e-3)
    assert run.losses[-1] < 0.9 * run.losses[0]
