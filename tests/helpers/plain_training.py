"""Plain training, as anyone would write it: what flush systems must equal."""

from __future__ import annotations

import torch
from timeprest.profiles.target import resolve
from timeprest.profiles.tasks.task import read_loss
from timeprest.profiles.tracing.call import Call
from timeprest.runtime.prepare.samples import Samples


def train_plainly(target, mini_batch, steps):
    """Losses of all mini-batches, and the model, after `steps` with seed 0 in one process."""
    found = resolve(target)
    task, names = found.task, found.call(1)[0].names
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(list(model.parameters()))
    samples = Samples(task, "train", mini_batch, seed=0)
    losses = []
    for b in range(steps):
        inputs, wanted = samples.take(0, range(b * mini_batch, (b + 1) * mini_batch))
        optimizer.zero_grad()
        loss = read_loss(task.loss(Call(inputs, names).of(model), wanted)).mean
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model
