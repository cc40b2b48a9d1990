"""Systems from outside: the page's file equals the built-in rows; what is wrong with a bad one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import timeprest
from click.testing import CliRunner
from helpers.output.doc_pages import ROOT, blocks
from helpers.plans import plan_by_hand, with_times
from timeprest.cli.plan import main as tp_plan
from timeprest.cli.run import main as tp_run
from timeprest.planner import plan as plan_module
from timeprest.planner.plan import Plan, pipeline_of, read_plan
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.systems import variants
from timeprest.planner.systems.operations import BACKWARD, FORWARD, UPDATE, Op
from timeprest.planner.systems.variants import VARIANTS, load_plugin, variant_named
from timeprest.profiles import plugins
from timeprest.profiles.errors import PlanError, PluginError, TaskWarning
from timeprest.profiles.files import write_file
from timeprest.profiles.plugins import VARIABLE, plugins_given
from timeprest.profiles.profile import OperationCost
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.trainer import Trainer

(SHOWN,) = (
    block.text
    for block in blocks(ROOT / "docs/plugins.md")
    if block.text.startswith("# my_pipemare.py")
)
STEPS = 12


pytestmark = pytest.mark.usefixtures("plugins_forgotten")


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "my_pipemare.py"
    path.write_text(SHOWN)
    return path


def settings_of(target, **more):
    asked = {"optimizer": OptimizerChoice(name="sgd", lr=0.05, momentum=0.9), "evaluate": False}
    return RunSettings(task=target, steps=STEPS, **{**asked, **more})


def same(a, b):
    assert read_losses(a / "metrics.jsonl") == read_losses(b / "metrics.jsonl")
    weights, others = load_weights(a), load_weights(b)
    assert weights.keys() == others.keys()
    assert all(w.equal(others[name]) for name, w in weights.items())


def both_plans(profile, stages):
    """Of the plugin's and of the built-in system; with as much memory, and as long a period."""
    plans = [
        plan_by_hand(with_times(profile), name, stages, 4, limits=range(stages, 0, -1))
        for name in ("my-pipemare", "pipemare")
    ]
    assert plans[0].predicted == plans[1].predicted
    assert max(s.version_difference for s in plans[0].predicted.stages) > 0
    return plans


@pytest.mark.parametrize("stages", [2, 4])
def test_the_file_is_the_built_in_system(stages, mine, mlp_profile, mlp_target, tmp_path):
    """Bit for bit, and holding as many bytes."""
    assert [system.name for system in load_plugin(str(mine))] == ["my-pipemare"]
    own, built_in = both_plans(mlp_profile, stages)
    # The same file, named otherwise, is the same plugin.
    load_plugin(f"{mine.parent}/../{mine.parent.name}/{mine.name}")
    a = run(own, settings_of(mlp_target), tmp_path / "a", inline=True)
    b = run(built_in, settings_of(mlp_target, lr_rescheduling=8), tmp_path / "b", inline=True)
    same(tmp_path / "a", tmp_path / "b")
    assert [s.peak for s in a.stages] == [s.peak for s in b.stages]


@pytest.mark.processes
def test_workers_load_it_too(mine, mlp_profile, mlp_target, tmp_path):
    timeprest.plugin(mine)
    own, built_in = both_plans(mlp_profile, 2)
    run(own, settings_of(mlp_target), tmp_path / "a")
    run(built_in, settings_of(mlp_target, lr_rescheduling=8), tmp_path / "b", inline=True)
    same(tmp_path / "a", tmp_path / "b")


def test_processes_are_told_of_files_with_any_name(tmp_path, monkeypatch):
    path = tmp_path / f"a{os.pathsep}b" / "m\u00efne \udcff.py"
    path.parent.mkdir()
    path.write_text(SHOWN)
    load_plugin(str(path))
    load_plugin(str(path))
    assert plugins_given() == [str(path)]
    # As in a process that has loaded nothing.
    VARIANTS.pop("my-pipemare"), variants._LOADED.clear(), plugins._FILES.clear()
    assert variant_named("my-pipemare").outside.plugin == str(path)
    monkeypatch.setenv(VARIABLE, str(path.name))
    with pytest.raises(PluginError, match=f"{VARIABLE}: .* is no list of files; unset it"):
        plugins_given()


def test_a_resumed_run_has_its_state(mine, mlp_profile, mlp_target, tmp_path):
    load_plugin(str(mine))
    own, _ = both_plans(mlp_profile, 2)
    run(own, settings_of(mlp_target, checkpoint_every=4), tmp_path / "whole", inline=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    (tmp_path / "parts" / "summary.json").unlink()
    Trainer(None, tmp_path / "parts", inline=True).resume({}, at=8)
    same(tmp_path / "whole", tmp_path / "parts")


def test_a_resumed_run_says_what_it_hasnt_of_its_state(mine, mlp_profile, mlp_target, tmp_path):
    counts = "    def after_update(self):\n        self.counted = getattr(self, 'counted', 0) + 1\n"
    mine.write_text(SHOWN.replace("    def after_update(self):\n", counts))
    load_plugin(str(mine))
    own, _ = both_plans(mlp_profile, 2)
    run(own, settings_of(mlp_target, checkpoint_every=4), tmp_path, inline=True)
    with pytest.warns(TaskWarning, match=r"^the rules' \(stage 0\) counted, [^,]*counted: changed"):
        Trainer(None, tmp_path, inline=True).resume({}, at=8)


def test_plans_name_their_plugin(mine, mlp_profile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_file("profile.json", with_times(mlp_profile))
    words = ["solve", "profile.json", "--variant", "my-pipemare", "--micro-batches", "4"]
    found = CliRunner().invoke(tp_plan, words)
    assert found.exit_code == 2
    assert "unknown system 'my-pipemare'; known are timeprest" in found.output
    found = CliRunner().invoke(tp_plan, [*words, "--plugin", mine.name])
    assert found.exit_code == 0, found.output
    assert read_plan("plan.json").plugin == "my_pipemare.py"
    # In a process of its own, it isn't there by itself; and planning doesn't import torch.
    script = (
        "import sys; from timeprest.cli.plan import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    outside = {k: v for k, v in os.environ.items() if k != VARIABLE}
    for more, code, why in (
        ([], 2, "of the plugin my_pipemare.py; give --plugin my_pipemare.py"),
        (["--plugin", "my_pipemare.py"], 0, ""),
        (["--plugin", "none.py"], 2, "none.py: no such file"),
    ):
        command = [sys.executable, "-c", script, "show", "plan.json", *more]
        ended = subprocess.run(command, env=outside, capture_output=True, text=True, check=False)
        assert ended.returncode == code, ended.stderr
        assert why in ended.stderr
        assert ended.stderr.count("\n") == (code > 0)


def test_a_run_is_exported_and_goes_on_with_its_plugin(mine, mlp_profile, mlp_target, tmp_path):
    """Without it, one line says what to give; when it has changed meanwhile, one line says so."""
    load_plugin(str(mine))
    plan, _ = both_plans(mlp_profile, 2)
    assert len(plan.plugin_checksum) == 16
    plan.save(tmp_path / "plan.json")
    where = tmp_path / "run"
    run(plan, settings_of(mlp_target, checkpoint_every=6), where, inline=True)
    commands = [
        ["export", where, "-o", tmp_path / "a.safetensors"],
        ["export", where, "--to", "dcp", "-o", tmp_path / "dcp"],
        ["report", where],
        [tmp_path / "plan.json", "--resume", "--run-dir", where, "--steps", STEPS + 2, "--inline"],
    ]

    def all_of(more):
        for words in commands:
            forget()
            found = CliRunner().invoke(tp_run, [*map(str, words), "-q", *more])
            yield found.exit_code, found.output

    def forget():
        VARIANTS.pop("my-pipemare", None)
        variants._LOADED.clear(), plugins._FILES.clear(), plan_module._told.clear()
        os.environ.pop(VARIABLE, None)

    for code, output in all_of([]):
        assert code == 2
        assert f"is of the plugin {mine}; give --plugin {mine}\n" in output
        assert output.count("\n") == 1
    given = ["--plugin", str(mine)]
    assert list(all_of(given)) == [(0, "")] * 4
    mine.write_text(SHOWN + "\n# as good as new\n")
    commands[0][-1], commands[1][-1] = tmp_path / "b.safetensors", tmp_path / "dcp2"
    commands[3][5] = STEPS + 4
    found = list(all_of(given))
    assert {code for code, _ in found} == {0}
    for _, output in found:  # once of a plan, by whatever names a command knows it
        assert f"plan.json: the plugin {mine} has changed since this was made" in output
        assert output.count("\n") == 1
    # A run that begins now is of the file as it is.
    forget(), load_plugin(str(mine))
    with pytest.warns(TaskWarning, match="has changed since"):
        old = Plan.load(shutil.copy(tmp_path / "plan.json", tmp_path / "other.json"))
    run(old, settings_of(mlp_target), tmp_path / "new", inline=True)
    now = hashlib.sha256(mine.read_bytes()).hexdigest()[:16]
    assert Plan.load(tmp_path / "new/plan.json").plugin_checksum == now


def test_plans_of_packages(mlp_profile, tmp_path, monkeypatch):
    """Found by their entry point, once they are asked for."""
    package, info = tmp_path / "their_systems.py", tmp_path / "theirs-1.dist-info"
    package.write_text(SHOWN.replace("my-pipemare", "their-pipemare"))
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[timeprest.systems]\npipes = their_systems\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = plan_of_name(mlp_profile, "their-pipemare")
    assert plan.plugin == "package pipes"
    text = json.dumps(msgspec.to_builtins(plan)).replace("their-pipemare", "other")
    Path(tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=r"of an installed package's timeprest\.systems 'pipes'"):
        Plan.load(tmp_path / "plan.json")


def plan_of_name(profile, name):
    variant_named(name)
    return plan_by_hand(with_times(profile), name, 2, 4, limits=[2, 1])


ROW = """
from timeprest.planner.systems.outside import Outside, StageRules
from timeprest.planner.systems.variants import Variant, VARIANTS
from dataclasses import replace
"""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1", "has no SYSTEMS, a list of rows"),
        ("\n1 / 0", "line 2: ZeroDivisionError: division by zero"),
        ("\n\nraise SystemExit(3)", "line 3: SystemExit: 3"),
        ("def", "SyntaxError: invalid syntax"),
        ("import nothing_of_this_name", "line 1: ModuleNotFoundError"),
        ("SYSTEMS = ['gpipe']", r"SYSTEMS\[0\]: is a str; give a Variant"),
        ("SYSTEMS = [VARIANTS['gpipe']]", "there is a system 'gpipe' already"),
        (
            "SYSTEMS = [replace(VARIANTS['gpipe'], name='a'), VARIANTS['gpipe']]",
            "there is a system",
        ),
        (
            "SYSTEMS = [replace(VARIANTS['gpipe'], name='a')] * 2",
            r"SYSTEMS\[1\].name: 'a' is anoth",
        ),
        ("SYSTEMS = [replace(VARIANTS['gpipe'], name='A b')]", r"name: 'A b': give small"),
        ("SYSTEMS = [replace(VARIANTS['gpipe'], name='all')]", "name: 'all' stands for every sys"),
        (
            "SYSTEMS = [replace(VARIANTS['gpipe'], name='a', schedule='given')]",
            r"SYSTEMS\[0\].schedule: 'given': give one of 'gpipe', ",
        ),
        (
            "SYSTEMS = [replace(VARIANTS['pipedream'], name='a', backward_weights='outside')]",
            r"SYSTEMS\[0\].outside: has no rules to make the backward's weights",
        ),
        (
            "SYSTEMS = [replace(VARIANTS['gpipe'], name='a', backward_weights='forward')]",
            "flushes, so all its passes run on the latest weights",
        ),
        (
            "SYSTEMS = [replace(VARIANTS['pipedream'], name='a', forward_weights='outside', "
            "outside=Outside(rules=StageRules))]",
            "horizon: say what the forward's weights aim at",
        ),
        *[
            (f"SYSTEMS = [replace(VARIANTS[{base!r}], name='a', {changed})]", why)
            for base, changed, why in (
                ("gpipe", "outside=5", "outside: is a int; give an Outside"),
                ("gpipe", "outside=Outside(rules=5)", "outside.rules: 5 can't be called; give a"),
                ("gpipe", "outside=Outside(copies=None)", "outside.copies: None can't be called"),
                ("gpipe", "outside=Outside(passes=-1)", "outside.passes: -1: give a number from 0"),
                (
                    "gpipe",
                    "outside=Outside(passes=[])",
                    r"outside.passes: \[\]: give a number from",
                ),
                ("gpipe", "summary=5", "summary: 5: give one line"),
                ("gpipe", "scratch_copies='x'", "scratch_copies: 'x': give a whole number from 0"),
                ("gpipe", "scratch_copies=-1", "scratch_copies: -1: give a whole number from 0"),
                ("spectrain", "scratch_copies=0", "scratch_copies: 0: give a whole number from 1 "),
                ("pipemare", "scratch_copies=1", "scratch_copies: 1: give a whole number from 2 "),
                ("gpipe", "backward_unit='mini'", "'mini' doesn't go with the schedule 'gpipe'; "),
                ("zb-h1", "split_backward=False", "split_backward: False doesn't go with the sc"),
                ("v-half", "split_backward=False", "give True"),
                ("gpipe", "split_backward=True", "give False"),
                ("pipedream", "backward_unit='micro'", "schedule '1f1b'; give 'mini'"),
                ("pipedream", "flushes=True", "flushes: True doesn't go with the schedule '1f1b'"),
                (
                    "pipedream",
                    "whole_mini_batches=False",
                    "whole_mini_batches: False .*; give True",
                ),
                ("pipemare", "half_memory=True", "half_memory: True doesn't go"),
                ("zb-v", "placement='loop'", "placement: 'loop' .* 'v-shaped'; give 'v'"),
                ("gpipe", "backward_weights='predicted'", "flushes, so all its passes run on the"),
                ("gpipe", "horizon='backward'", "flushes, so all its passes run on the latest"),
                ("pipedream", "forward_weights='predicted'", "prediction: say what the forward's"),
                ("spectrain", "horizon=''", "horizon: say what the forward's weights aim at"),
                (
                    "spectrain",
                    "backward_weights='forward'",
                    "'forward' needs the forward's own weights; those that are 'predicted' aren't",
                ),
                (
                    "pipemare",
                    "outside=Outside(rules=StageRules)",
                    "'corrected' weights have rules of their own",
                ),
            )
        ],
    ],
)
def test_bad_plugins(text, why, tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(text if text.startswith(("x", "\n", "def", "import")) else ROW + text)
    with pytest.raises(
        PluginError, match=rf"bad\.py: {why}|bad\.py: SYSTEMS\[0\].*{why}"
    ) as raised:
        load_plugin(str(path))
    assert "\n" not in str(raised.value)
    assert not {"a", "all"} & set(VARIANTS)


def test_every_row_of_the_table_could_be_a_plugins(tmp_path):
    path = tmp_path / "again.py"
    rows = "[replace(row, name=f'{row.name}-too') for row in VARIANTS.values()]"
    path.write_text(f"{ROW}SYSTEMS = {rows}")
    assert len(load_plugin(str(path))) == len(VARIANTS) // 2


@pytest.mark.parametrize("mistake", ["1 / 0", "raise SystemExit('none')"])
def test_copies_that_fail_name_plugin_and_line(mistake, mlp_profile, tmp_path):
    path = tmp_path / "bad.py"
    row = "replace(VARIANTS['pipedream'], name='a', outside=Outside(copies=copies))"
    path.write_text(f"{ROW}\ndef copies(context):\n    {mistake}\n\nSYSTEMS = [{row}]\n")
    load_plugin(str(path))
    why = r"bad\.py: line 7: copies for stage 0: (ZeroDivisionError: div|SystemExit: none$)"
    with pytest.raises(PluginError, match=why):
        plan_by_hand(with_times(mlp_profile), "a", 3, 1, limits=[3, 2, 1])


@pytest.mark.parametrize("stages", [1, 2])
def test_declared_passes_make_updates_longer(stages, mlp_profile, tmp_path):
    """On the last stage too, where no other rule takes time."""
    path = tmp_path / "passes.py"
    rows = [f"replace(VARIANTS['gpipe'], name='p{k}', outside=Outside(passes={k}))" for k in (0, 3)]
    path.write_text(f"{ROW}SYSTEMS = [{', '.join(rows)}]")
    load_plugin(str(path))
    cost = OperationCost(forward_s=0.0, mini_batch_s=0.0, mix_s_per_byte=1e-6)
    profile = msgspec.structs.replace(with_times(mlp_profile), operation=cost)
    without, declared = (plan_by_hand(profile, f"p{k}", stages, 4).predicted for k in (0, 3))
    most = max(stage.parameter_bytes for stage in declared.stages)
    assert declared.period_s - without.period_s == pytest.approx(3e-6 * most)


RULES = """
class Ahead(StageRules):
    def __init__(self, context, parameters):
        super().__init__(context, parameters)
        self.kept = {"last": {p: p.detach().clone().zero_() for p in parameters}}

    def before_update(self):
        for p, last in self.kept["last"].items():
            if p.grad is not None:
                last.copy_(p.grad)

    def forward_weights(self, updates, into):
        # As spectrain without momentum.
        for p, target in into.items():
            target.copy_(p.detach()).sub_(self.kept["last"][p], alpha=0.05 * updates)


def heavier(context, optimizer):
    for group in optimizer.param_groups:
        group["weight_decay"] = context.stage / context.updates
    return optimizer


outside = Outside(rules=Ahead, update=heavier, copies=lambda context: 2)
row = VARIANTS["pipeoptim"]
row = replace(row, prediction="", scratch_copies=0, forward_weights="outside", outside=outside)
bad = replace(outside, copies=lambda context: 0.5)
SYSTEMS = [replace(row, name="ahead"), replace(row, name="half", outside=bad)]
"""


def test_forwards_and_optimizers_of_ones_own(mlp_profile, mlp_target, tmp_path):
    """A prediction from outside is the built-in one; the optimizer gets what the rule gives it."""
    path = tmp_path / "ahead.py"
    path.write_text(ROW + RULES)
    load_plugin(str(path))
    plan = plan_by_hand(with_times(mlp_profile), "ahead", 3, 1, limits=[3, 2, 1])
    sgd = OptimizerChoice(name="sgd", lr=0.05)
    asked = RunSettings(task=mlp_target, steps=STEPS, optimizer=sgd, evaluate=False)
    summary = run(plan, asked, tmp_path / "a", inline=True)
    for stage, predicted in zip(summary.stages, plan.predicted.stages, strict=True):
        assert stage.peak.total <= predicted.memory_bytes
    assert plan.predicted.stages[0].memory.versions_bytes >= 2 * (
        plan.predicted.stages[0].parameter_bytes
    )
    path.write_text(ROW + RULES.replace("context.stage / context.updates", "0.0"))
    VARIANTS.pop("ahead"), VARIANTS.pop("half")
    variants._LOADED.clear(), plugins._FILES.clear()
    load_plugin(str(path))
    plan = plan_by_hand(with_times(mlp_profile), "ahead", 3, 1, limits=[3, 2, 1], mini_batch=8)
    run(plan, asked, tmp_path / "b", inline=True)
    built_in = plan_by_hand(with_times(mlp_profile), "pipeoptim", 3, 1, limits=[3, 2, 1])
    run(built_in, asked, tmp_path / "c", inline=True)
    assert read_losses(tmp_path / "b" / "metrics.jsonl") == pytest.approx(
        read_losses(tmp_path / "c" / "metrics.jsonl"), abs=1e-12
    )
    assert read_losses(tmp_path / "a" / "metrics.jsonl") != read_losses(
        tmp_path / "b" / "metrics.jsonl"
    )
    with pytest.raises(PluginError, match=r"ahead\.py: copies gives 0\.5 for stage 0"):
        plan_by_hand(with_times(mlp_profile), "half", 3, 1, limits=[3, 2, 1])


def run_of_row(row, code, profile, target, path, **more):
    """Trains a plugin's system "a" inline: the row is `row`, after `code`."""
    path.write_text(f"{ROW}{code}\nSYSTEMS = [{row}]\n")
    (system,) = load_plugin(str(path))
    n = 1 if system.whole_mini_batches else 4
    limits = [1, 1] if system.flushes else [2, 1]
    plan = plan_by_hand(with_times(profile), "a", 2, n, limits=limits)
    return run(plan, settings_of(target, **more), path.parent / "run", inline=True)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def __init__(self, *given): 1 / 0", "line 6: rules of a for stage 0: ZeroDivisionError"),
        (
            "def __init__(self, *given): pass",
            "rules of a for stage 0: kept is a mappingproxy; give",
        ),
        ("kept = property(lambda s: [], lambda s, _: 0)", "kept is a list; give a dict of a name"),
        ("kept = property(lambda s: {'m': 1}, lambda s, _: 0)", "kept has 'm' with a int; give a"),
        (
            "kept = property(lambda s: {'m': {s.parameters[0]: 1}}, lambda s, _: 0)",
            r"kept\['m'\] has a int for a parameter; give a tensor",
        ),
        (
            "kept = property(lambda s: {'m': {s.parameters[0] * 2: 1}}, lambda s, _: 0)",
            r"kept\['m'\] has a Tensor of shape \(.*\), which isn't one of the parameters that",
        ),
        ("def rate(self, update): return 'x'", "rate: ValueError: could not"),
        ("def before_update(self): 1 / 0", "line 6: before_update: ZeroDivisionError"),
        ("def after_update(self): 1 / 0", "line 6: after_update: ZeroDivisionError"),
        ("", "backward_weights: NotImplementedError"),
        ("forward_weights = 5", "forward_weights: TypeError"),
    ],
)
def test_rules_that_fail_name_plugin_and_hook(code, why, mlp_profile, mlp_target, tmp_path):
    weights = (
        "forward_weights='outside', horizon='backward', backward_weights='latest'"
        if "forward_" in code
        else ("backward_weights='outside'")
    )
    row = f"replace(VARIANTS['pipedream'], name='a', {weights}, outside=Outside(rules=Rules))"
    code = f"class Rules(StageRules):\n    {code or 'pass'}"
    with pytest.raises(PluginError, match=rf"bad\.py: .*{why}") as raised:
        run_of_row(row, code, mlp_profile, mlp_target, tmp_path / "bad.py")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        ("return 1 / 0", "line 6: update of a for stage 0: ZeroDivisionError: division by zero"),
        ("optimizer.defaults", "update of a for stage 0: gives a NoneType; return the torch.opt"),
        ("return [optimizer]", "update of a for stage 0: gives a list; return the torch.optim.Op"),
    ],
)
def test_updates_that_make_no_optimizer(mistake, why, mlp_profile, mlp_target, tmp_path):
    """Before the run has a directory."""
    row = "replace(VARIANTS['gpipe'], name='a', outside=Outside(update=update))"
    code = f"def update(context, optimizer):\n    {mistake}"
    with pytest.raises(PluginError, match=rf"bad\.py: {why}") as raised:
        run_of_row(row, code, mlp_profile, mlp_target, tmp_path / "bad.py")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


TELLING = """
TOLD = []

class Rules(StageRules):
    version = 0

    def after_update(self):
        self.version += 1

    def forward_weights(self, updates, into):
        TOLD.append((self.context.stage, self.version, updates))
        for p, target in into.items():
            target.copy_(p.detach())
"""


@pytest.mark.parametrize("system", ["pipemare", "timeprest"])
def test_forwards_look_ahead_to_the_backward_of_their_own_micro_batch(
    system, mlp_profile, mlp_target, tmp_path
):
    """Micro-batches of one mini-batch may have updates between them."""
    row = (
        f"replace(VARIANTS[{system!r}], name='a', forward_weights='outside', horizon='backward', "
        "backward_weights='latest', scratch_copies=0, outside=Outside(rules=Rules))"
    )
    path = tmp_path / "telling.py"
    run_of_row(row, TELLING, mlp_profile, mlp_target, path)
    told = sys.modules["timeprest_plugin_telling"].TOLD
    pipeline = pipeline_of(read_plan(tmp_path / "run/plan.json"))
    for s, ops in enumerate(make_schedule(pipeline, STEPS)):
        version, at = 0, {}
        for op in ops:
            at[op] = version
            version += op.kind == UPDATE
        ahead = []
        for op, seen in at.items():
            if op.kind == FORWARD:
                i = op.micro_batch if pipeline.variant.backward_unit == "micro" else None
                ahead.append((s, seen, at[Op(BACKWARD, op.mini_batch, i)] - seen))
        assert [one for one in told if one[0] == s] == [one for one in ahead if one[2]]
    assert told


AS_LATEST = """
class Rules(StageRules):
    def backward_weights(self, updates, into):
        for p, target in into.items():
            target.copy_(p.detach())

row = replace(VARIANTS["pipemare"], forward_weights="predicted", horizon="backward")
row = replace(row, prediction="optimizer-step")
SYSTEMS = [
    replace(row, name="a", backward_weights="outside", outside=Outside(rules=Rules)),
    replace(row, name="b", backward_weights="latest"),
]
"""


def test_backwards_outside_between_predicted_forwards(mlp_profile, mlp_target, tmp_path):
    """Both are made in the same memory."""
    path = tmp_path / "both.py"
    path.write_text(ROW + AS_LATEST)
    load_plugin(str(path))
    for name in "ab":
        plan = plan_by_hand(with_times(mlp_profile), name, 4, 2, limits=[4, 3, 2, 1])
        run(plan, settings_of(mlp_target), tmp_path / name, inline=True)
    same(tmp_path / "a", tmp_path / "b")


WATCHING = """
class Rules(StageRules):
    \"\"\"Backwards on weights between the forward's, which it keeps, and the latest.\"\"\"

    def __init__(self, context, parameters):
        super().__init__(context, parameters)
        self.flying, self.at = {}, None

    def forward(self, run):
        self.flying[run.op.mini_batch] = [p.detach().clone() for p in self.parameters]

    def before_backward(self, op):
        self.at = self.flying.pop(op.mini_batch)

    def backward_weights(self, updates, into):
        for before, target in zip(self.at, into.values()):
            target.copy_(before)

SYSTEMS = [
    replace(VARIANTS["pipedream-unstashed"], name="a", forward_weights="latest",
        backward_weights="outside", outside=Outside(rules=Rules)),
]
"""


def test_rules_may_keep_what_forwards_ran_on(mlp_profile, mlp_target, tmp_path):
    """And be a stash: then it is pipedream."""
    path = tmp_path / "watching.py"
    path.write_text(ROW + WATCHING)
    load_plugin(str(path))
    for name, run_dir in (("a", "a"), ("pipedream", "b")):
        plan = plan_by_hand(with_times(mlp_profile), name, 4, 1)
        run(plan, settings_of(mlp_target), tmp_path / run_dir, inline=True)
    same(tmp_path / "a", tmp_path / "b")


SWAPPING = """
from contextlib import contextmanager

class Rules(StageRules):
    \"\"\"Every forward runs on the weights that the run began with.\"\"\"

    def __init__(self, context, parameters):
        super().__init__(context, parameters)
        self.kept = {"first": {p: p.detach().clone() for p in parameters}}

    @contextmanager
    def forward(self, run):
        before = [p.detach().clone() for p in self.parameters]
        try:
            for p, first in self.kept["first"].items():
                p.data.copy_(first)
            yield
        finally:
            for p, own in zip(self.parameters, before):
                p.data.copy_(own)
"""


@pytest.mark.parametrize("system", ["pipedream-unstashed", "gpipe"])
def test_forwards_run_on_what_their_context_swaps_in(system, mlp_profile, mlp_target, tmp_path):
    """At every stage; evaluation runs on the weights as they are."""
    row = f"replace(VARIANTS[{system!r}], name='a', forward_weights='latest', outside=outside)"
    code = f"{SWAPPING}\noutside = Outside(rules=Rules, copies=lambda context: 2)"
    path = tmp_path / "a.py"
    swapped = run_of_row(row, code, mlp_profile, mlp_target, path, evaluate=True)
    n = read_plan(tmp_path / "run/plan.json").micro_batches
    plan = plan_by_hand(with_times(mlp_profile), system, 2, n)
    settings = settings_of(
        mlp_target, evaluate=True, optimizer=OptimizerChoice(name="sgd", lr=1e-300)
    )
    still = run(plan, settings, tmp_path / "still", inline=True)
    losses = [read_losses(tmp_path / name / "metrics.jsonl") for name in ("run", "still")]
    assert losses[0] == losses[1]
    assert swapped.epochs[-1].test != still.epochs[-1].test


def test_a_hook_of_a_pass_that_fails_is_named(mlp_profile, mlp_target, tmp_path):
    row = "replace(VARIANTS['gpipe'], name='a', outside=Outside(rules=Rules))"
    code = "class Rules(StageRules):\n    def due(self, mini_batch):\n        1 / 0"
    with pytest.raises(PluginError, match=r"bad\.py: line 7: due: ZeroDivisionError"):
        run_of_row(row, code, mlp_profile, mlp_target, tmp_path / "bad.py")
