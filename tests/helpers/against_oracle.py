"""Runs held against the oracle: same weights, losses, and versions used and held."""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from itertools import count

import numpy as np
import pytest
import torch
from helpers.oracle import SGD, Adam, Muon, Oracle, delays, parse
from helpers.output.schedules import schedule_text
from timeprest.planner.plan import pipeline_of
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.profiles.target import resolve
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings


def orthogonal_by_torch(matrix):
    """Muon's own, of a step from zero."""
    p = torch.nn.Parameter(torch.zeros(matrix.shape, dtype=torch.float64))
    p.grad = torch.from_numpy(matrix.copy())
    torch.optim.Muon([p], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    # Its scale by default, that of taller than wide matrices.
    return -p.detach().numpy() / max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5


STEPS = 12
LONG = 36
"""Mini-batches whose middle shows the steady state."""

OPTIMIZERS = {
    "sgd": ({"name": "sgd"}, SGD, {}),
    "momentum": ({"name": "sgd", "momentum": 0.9}, SGD, {"momentum": 0.9}),
    "adam": ({"name": "adam"}, Adam, {}),
    "decayed sgd": ({"name": "sgd", "weight_decay": 0.1}, SGD, {"weight_decay": 0.1}),
    "decayed momentum": (
        {"name": "sgd", "momentum": 0.8, "weight_decay": 0.1},
        SGD,
        {"momentum": 0.8, "weight_decay": 0.1},
    ),
    "decayed adam": ({"name": "adam", "weight_decay": 0.1}, Adam, {"weight_decay": 0.1}),
    "adamw": (
        {"name": "adamw", "weight_decay": 0.1},
        Adam,
        {"weight_decay": 0.1, "decoupled": True},
    ),
    "muon": (
        {"name": "muon", "weight_decay": 0.1},
        Muon,
        {
            "weight_decay": 0.1,
            "matrices": ("l0.weight", "l1.weight", "l2.weight"),
            # Any rounding to bfloat16 that falls the other way is seen: the rule alone is compared.
            "orthogonal": orthogonal_by_torch,
        },
    ),
}
"""What tp-run is asked for, the oracle's own, and what that one is given."""


def settings_of(target, optimizer, **more):
    asked, _, _ = OPTIMIZERS[optimizer]
    choice = OptimizerChoice(**asked, lr=0.05)
    return RunSettings(
        task=target, steps=STEPS, optimizer=choice, log_operations=True, evaluate=False, **more
    )


def ask_oracle(plan, asked, optimizer):
    """What the oracle makes of the plan's own orders, epoch by epoch."""
    task = resolve(asked.task).task
    torch.manual_seed(0)
    weights = {name: w.numpy().copy() for name, w in task.model().state_dict().items()}
    _, make, given_ = OPTIMIZERS[optimizer]
    epochs = list(batches_by_epoch(task, plan.mini_batch, plan.micro_batches, asked.ragged))
    updates = sum(-(-len(epoch) // plan.update_every) for epoch in epochs)
    oracle = Oracle(
        plan.variant,
        [list(s.nodes) for s in plan.stages],
        weights,
        lambda: make(lr=0.05, **given_),
        [batch for epoch in epochs for batch in epoch],
        decay=asked.decay,
        rate=asked.decay_rate,
        schedule=warmed_up(updates) if asked.warmup else lambda update: 1.0,
        clip=asked.clip_norm,
        counts=getattr(task, "counts", np.ones_like),
        delays=delays_of(plan),
        rescheduling=asked.lr_rescheduling,
        discrepancy=asked.discrepancy_decay if asked.discrepancy_correction else None,
        stagewise=asked.stagewise_momentum,
        ties=getattr(task, "TIES", None),
    )
    first = 0
    for epoch in epochs:
        oracle.run(schedule_text(make_schedule(pipeline_of(plan), len(epoch))), first)
        first += len(epoch)
    return oracle


def delays_of(plan):
    """Per stage, the oracle's d."""
    return _delays_of(pipeline_of(plan), plan.variant)


@lru_cache(maxsize=256)
def _delays_of(pipeline, variant):
    return delays(parse(schedule_text(make_schedule(pipeline, LONG))), variant)


def batches_by_epoch(task, mini_batch, n, ragged):
    """Mini-batches of N micro-batches that differ by one sample at most; 12 in all."""
    if hasattr(task, "epochs"):
        left = STEPS
        for epoch in task.epochs(mini_batch, n):
            yield epoch[:left]
            left -= len(epoch[:left])
            if not left:
                return
    x, y = (part.numpy() for part in task.data("train").tensors)
    left = STEPS
    for epoch in count():
        shuffle = torch.Generator().manual_seed(epoch)
        shuffled = torch.randperm(len(x), generator=shuffle).numpy()
        each = len(x) // mini_batch + (ragged == "pad" and len(x) % mini_batch > 0)
        parts = [
            np.array_split(shuffled[b * mini_batch :][:mini_batch], n)
            for b in range(min(each, left))
        ]
        yield [[(x[k], y[k]) for k in micro_batches] for micro_batches in parts]
        left -= len(parts)
        if not left:
            return


def warmed_up(updates):
    """--lr-schedule linear --warmup 4, for so many updates."""
    return lambda k: (k + 1) / 4 if k < 4 else 1 - (k - 4) / (updates - 4)


def compare(run_dir, plan, oracle, summary):
    state = load_weights(run_dir)
    wanted = oracle.weights()
    assert state.keys() == wanted.keys()
    for name, weight in wanted.items():
        np.testing.assert_allclose(state[name].numpy(), weight, rtol=0, atol=1e-10, err_msg=name)
    np.testing.assert_allclose(
        read_losses(run_dir / "metrics.jsonl"), oracle.losses, rtol=0, atol=1e-10
    )
    for s, stage in enumerate(plan.stages):
        lines = (run_dir / "operations" / f"stage{s}.jsonl").read_text().splitlines()
        logged = [(line["op"], line["version"]) for line in map(json.loads, lines)]
        assert logged == oracle.log[s]
        report = summary.stages[s]
        assert report.versions_held == oracle.most_held(s, recompute=stage.recompute)
        assert report.version_differences == Counter(oracle.differences[s])
        compare_staleness(report.epochs, oracle.differences[s], oracle.weight_distances[s])


def compare_staleness(epochs, differences, distances):
    done = 0
    for epoch in epochs:
        begin, done = done, done + sum(epoch.version_differences.values())
        assert epoch.version_differences == Counter(differences[begin:done])
        seen = distances[begin:done]
        assert epoch.weight_distance == pytest.approx(np.mean(seen), abs=1e-10)
        assert epoch.largest_weight_distance == pytest.approx(max(seen), abs=1e-10)
    assert done == len(differences)


def train(plan, target, optimizer, run_dir, *, inline=True, **more):
    """Run the plan, compare with the oracle, return the summary."""
    asked = settings_of(target, optimizer, **more)
    summary = run(plan, asked, run_dir, inline=inline)
    compare(run_dir, plan, ask_oracle(plan, asked, optimizer), summary)
    return summary
