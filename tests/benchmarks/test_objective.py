"""What `make bench-objective` compares: its tasks and its candidates. Nothing is trained."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from helpers.by_hand.profiles import chain
from timeprest.profiles.files import write_file
from timeprest.tests.benchmarks.objective import tasks
from timeprest.tests.benchmarks.objective.__main__ import SYSTEMS, Cell, Outcome, Times, _row, _same


@pytest.mark.parametrize("name", ["regression", "letters", "waves", "rows"])
def test_tasks_have_layers_for_eight_stages_and_a_loss(name):
    task = getattr(tasks, name)
    torch.manual_seed(0)
    model, data = task.model(), task.data("train")
    assert len(model) > 8
    inputs, target = zip(*(data[k] for k in range(8)), strict=True)
    loss = task.loss(model(torch.stack(inputs)), torch.stack(target))
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(p.grad is not None for p in model.parameters())


def test_candidates_are_each_late_by_no_more_than_asked(tmp_path):
    write_file(tmp_path / "regression.json", chain(8))
    cell = Cell("regression", 2, tmp_path)
    assert (cell.delays, Cell("letters", 8, tmp_path).delays) == ((1,), (1, 3, 7))
    plans = cell.plans((1, 1))
    assert {plan.variant for plan in plans} == set(SYSTEMS)
    assert all(max(s.delay or 0 for s in plan.predicted.stages) <= 1 for plan in plans)
    assert not any(_same(a, b) for k, a in enumerate(plans) for b in plans[:k])


def test_a_row_says_what_wasnt_reached_and_what_was_said():
    found = Outcome(
        cell="letters-2",
        best="`pipedream`, delay 1",
        chosen="`spectrain`, delay 1",
        over_best=Times(1.2, True),
        equal=False,
        said=True,
        predicted=0.9,
        cost=0.2,
        shortest="`timeprest`, delay 1",
        shortest_over_best=Times(1.5, False),
    )
    assert _row(found).endswith("| 1.20 |  | yes | 0.90 | 20% | `timeprest`, delay 1 | > 1.50 |")
    lost = msgspec.structs.replace(found, over_best=Times(math.inf, False), predicted=math.inf)
    assert "| diverged |  | yes | – |" in _row(lost)
