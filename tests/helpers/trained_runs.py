"""Small runs whose weights are exported, and held against plain PyTorch."""

from __future__ import annotations

from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from safetensors.torch import load_file
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings

TASKS = TESTS / "tasks/variety_tasks.py"
TIED = f"{TASKS}:TiedTask"


def runs_of_tasks(tmp_path_factory):
    """What gives the run of a task, made once: two mini-batches on two stages."""
    made = {}

    def run_of(task):
        if task not in made:
            where = made[task] = tmp_path_factory.mktemp("run") / "run"
            found = measure(resolve(task), batch_size=4, micro_batch_sizes=[2, 4], seconds=0)
            plan = plan_by_hand(with_times(found), "gpipe", 2, 2, mini_batch=4, tied="split")
            run(plan, RunSettings(task=task, steps=2, evaluate=False), where, inline=True)
        return made[task]

    return run_of


def with_run_weights(where, model):
    """The model with the run's final weights, by plain PyTorch."""
    for file in (where / "weights").iterdir():
        model.load_state_dict(load_file(file), strict=False)
    return model.eval()
