"""Systems from outside that flush: with rules or an update of their own they aren't plain training,
for studies, plans by studies, and exports; and studies know the file that they are from."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.by_hand.studies import PLAIN_ARM, arm, study
from helpers.plans import plan_by_hand, with_times
from timeprest.planner.exports.export import exported
from timeprest.planner.exports.torch_pipelining import ModelFacts
from timeprest.planner.systems import variants
from timeprest.planner.systems.variants import VARIANTS, load_plugin
from timeprest.profiles import plugins
from timeprest.profiles.errors import PlanError
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.records.run_dir import RunDir
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.study.choices import StudyChoices
from timeprest.runtime.study.figures.choose import StudyFigures
from timeprest.runtime.study.figures.study import PLAIN
from timeprest.runtime.study.trainings.conduct import prospect
from timeprest.runtime.study.trainings.training import train_one
from timeprest.runtime.study.trainings.work import Asked, Finished

pytestmark = pytest.mark.usefixtures("plugins_forgotten")

SGD = OptimizerChoice(name="sgd", lr=0.05)
SYSTEMS = """
from dataclasses import replace
from timeprest.planner.systems.outside import Outside, StageRules
from timeprest.planner.systems.variants import VARIANTS


class Slow(StageRules):
    def rate(self, update):
        return 0.01


def decayed(context, optimizer):
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.5
    return optimizer


row = VARIANTS["pipedream-flush"]
SYSTEMS = [
    replace(row, name="alike"),
    replace(row, name="slow", outside=Outside(rules=Slow)),
    replace(row, name="decayed", outside=Outside(update=decayed)),
]
"""
NAMES = ("alike", "slow", "decayed")


@pytest.fixture
def plans(mlp_profile, tmp_path):
    path = tmp_path / "flushing.py"
    path.write_text(SYSTEMS)
    load_plugin(str(path))
    return {name: plan_by_hand(with_times(mlp_profile), name, 2, 2) for name in NAMES}


def test_which_systems_are_plain_training(plans):
    assert [VARIANTS[name].is_plain_training for name in NAMES] == [True, False, False]
    built_in = [v for name, v in VARIANTS.items() if name not in NAMES]
    assert all(v.is_plain_training == v.flushes for v in built_in)


def test_a_study_trains_what_the_plugin_says(plans, mlp_target, tmp_path):
    settings = RunSettings(task=mlp_target, steps=12, optimizer=SGD)
    chosen = StudyChoices(seeds=2, tune=1, longer=1.0, eval_every=0)
    asked = prospect(list(plans.values()), NAMES, settings, chosen)
    arms = [plan.arm for plan in asked.plans]
    assert arms == [PLAIN, "slow", "decayed"]
    for k, name in enumerate(arms):
        found = train_one(asked.work, Asked(arm=k, rate=0.05, warmup=0, seed=0, length=12))
        run(plans[NAMES[k]], settings, tmp_path / name, inline=True)
        losses = read_losses(RunDir(tmp_path / name).metrics)
        assert found.losses == pytest.approx(losses, rel=1e-5)


def test_trainings_end_with_what_they_follow_from(plans, mlp_target, tmp_path, monkeypatch):
    """Another plugin's file, or another module of the task, and there are none of its trainings."""
    (tmp_path / "a_study_task.py").write_text(Path(mlp_target.rpartition(":")[0]).read_text())
    monkeypatch.syspath_prepend(tmp_path)
    settings = RunSettings(task="a_study_task:MLPTask", steps=4, optimizer=SGD)

    def paths():
        asked = prospect([plans["slow"]], ["slow"], settings, StudyChoices(eval_every=0))
        done = Finished(tmp_path, asked.work)
        return [done.path(Asked(arm=k, rate=1, warmup=0, seed=0, length=6)) for k in range(2)]

    first = paths()
    assert first == paths()
    for name in NAMES:
        VARIANTS.pop(name)
    variants._LOADED.clear(), plugins._FILES.clear()
    (tmp_path / "flushing.py").write_text(SYSTEMS.replace("0.01", "0.02"))
    load_plugin(str(tmp_path / "flushing.py"))
    second = paths()
    assert second[0] == first[0]
    assert second[1] != first[1]
    with (tmp_path / "a_study_task.py").open("a") as file:
        file.write("\n")
    assert not set(paths()) & set(second)


@pytest.mark.parametrize("stages", [1, 2])
def test_plans_by_a_study_have_its_own_figure(stages, plans, mlp_profile):
    own = plan_by_hand(with_times(mlp_profile), "slow", stages, 2)
    arms = [PLAIN_ARM, arm("slow", (1.2, 1.3, 1.1))]
    figures = StudyFigures(study(arms, {"slow": 1.0}, plans={"slow": own}))
    assert not figures.study.plans[0].is_plain_training
    found = figures.judge("slow", 1, 2, own.predicted).overhead
    assert found.exact
    assert found.mean == pytest.approx(1.2, rel=0.1)
    assert figures.judge("alike", 1, 2, own.predicted).overhead.mean == 1
    assert figures.judge("decayed", 1, 2, own.predicted) is None


@pytest.mark.parametrize("name", ["slow", "decayed"])
@pytest.mark.parametrize("engine", plugins.names("engines"))
def test_an_export_doesnt_drop_its_rules(engine, name, plans):
    why = rf"{name} has rules of its own for updates \(.*flushing\.py\), and there .* --variant "
    with pytest.raises(PlanError, match=why) as refused:
        exported(plans[name], engine, look)
    assert name not in str(refused.value).partition("--variant")[2]
    assert "\n" not in str(refused.value)


def look(plan):
    names = tuple(name for stage in plan.stages for name in stage.nodes)
    return ModelFacts(names, dict.fromkeys(names, 1), ties=(), one_tensor=True, weighted=False)
