"""Plain training, as anyone would write it: what flush systems must equal."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from helpers.alike import assert_same_weights
from timeprest.profiles.target import resolve
from timeprest.profiles.tasks.task import read_loss
from timeprest.profiles.tracing.call import Call
from timeprest.runtime.prepare.samples import Samples
from timeprest.runtime.records.progress import read_losses


def train_plainly(
    target,
    mini_batch,
    steps,
    make=None,
    *,
    last=False,
    clip_norm=None,
    schedule=None,
    context=nullcontext,
):
    """Losses of all mini-batches, and the model, after `steps` with seed 0 in one process.

    Args:
        make: parameters under their names → optimizer; by default the task's own.
        last: what is left of an epoch and doesn't fill a mini-batch is one, too.
        schedule: optimizer → scheduler, stepped after each update.
        context: of forwards and their losses.
    """
    found = resolve(target)
    task, names = found.task, found.call(1)[0].names
    torch.manual_seed(0)
    model = task.model()
    named = list(model.named_parameters())
    optimizer = make(named) if make else task.optimizer([p for _, p in named])
    scheduler = schedule(optimizer) if schedule else None
    samples = Samples(task, "train", mini_batch, seed=0)
    each = samples.size // mini_batch + (last and samples.size % mini_batch > 0)
    losses = []
    for b in range(steps):
        epoch, k = divmod(b, each)
        positions = range(k * mini_batch, min((k + 1) * mini_batch, samples.size))
        inputs, wanted = samples.take(epoch, positions)
        real = tuple(x[: len(positions)] for x in inputs)
        optimizer.zero_grad()
        with context():
            loss = read_loss(task.loss(Call(real, names).of(model), wanted)).mean
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses, model


def assert_trained_as(where, trained):
    """A run has the losses and weights of what `train_plainly` gave."""
    losses, model = trained
    assert read_losses(where / "metrics.jsonl") == pytest.approx(losses, abs=1e-10)
    assert_same_weights(where, model.state_dict(), atol=1e-10)
