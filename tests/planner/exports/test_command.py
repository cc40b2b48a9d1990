"""tp-plan export: what it writes, prints and refuses; and torch runs what it wrote."""

from __future__ import annotations

import functools
import itertools
import json
import re
import runpy
import subprocess
import sys

import msgspec
import pytest
import timeprest
import torch
import torch.distributed as dist
from helpers.by_hand.profiles import profile_by_hand
from helpers.output.commands import called
from helpers.plans import chain_plan, plan_by_hand, with_times
from helpers.processes.forked import Python
from timeprest.planner.exports.blocks import blocks_of
from timeprest.planner.exports.export import exported
from timeprest.planner.exports.facts import facts_of
from timeprest.profiles.errors import FileError, PlanError, TargetError
from timeprest.profiles.files import write_file
from timeprest.runtime.records.progress import read_losses

BERT = "bert-base:layers=4,width=16,heads=2,vocabulary=50,length=8,dropout=0,tied=0"


call = functools.partial(called, "tp-plan")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a plan in it."""
    write_file(tmp_path / "plan.json", chain_plan("pipedream-flush"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_are_written_whole_or_not_at_all(folder):
    said = call("export", "plan.json", "--to", "deepspeed", "-o", "out")
    assert said.splitlines()[:2] == ["wrote out/pipeline_module.py", "wrote out/ds_config.json"]
    there = sorted(path.name for path in (folder / "out").iterdir())
    assert there == ["ds_config.json", "pipeline_module.py"]
    said = call("export", "plan.json", "--to", "torchtitan", "-o", "out", code=2)
    assert ": out: isn't overwritten" in said
    assert there == sorted(path.name for path in (folder / "out").iterdir())
    said = call("export", "plan.json", "--to", "megatron", "-o", "other", code=2)
    assert said.endswith(
        ": Megatron-Core can't run this plan: its layers are in no list of transformer blocks\n"
    )
    assert sorted(path.name for path in folder.iterdir()) == ["out", "plan.json"]


def test_a_plan_without_a_model_has_no_script(folder):
    said = call("export", "plan.json", "--to", "torch", "-o", "out", code=2)
    assert said.count("\n") == 1
    assert "by-hand" in said or "target" in said


def test_what_a_note_repeats_may_have_braces(folder):
    plan = chain_plan("pipedream-flush")
    own = msgspec.structs.replace(plan.profile, target="{a}.py:Task")
    write_file("other.json", msgspec.structs.replace(plan, profile=own))
    said = call("export", "other.json", "--to", "deepspeed", "-o", "out")
    assert "couldn't be looked at ({a}.py" in " ".join(said.split())


def test_errors_about_a_plan_name_its_file(folder):
    plan = chain_plan("pipedream-flush")
    own = msgspec.structs.replace(plan.profile, front_end="table", target="costs.csv")
    write_file("other.json", msgspec.structs.replace(plan, profile=own))
    assert "other.json: was made from a table of costs" in call(
        *("export", "other.json", "--to", "torch", "-o", "out"), code=2
    )
    assert "other.json: was made from a table of costs" in called(
        *("tp-run", "study", "other.json", "--steps", "2"), code=2
    )


def test_it_is_quiet_and_json(folder):
    assert call("export", "plan.json", "--to", "torchtitan", "-o", "a", "-q") == ""
    found = json.loads(call("export", "plan.json", "--to", "torchtitan", "-o", "b", "--json"))
    assert found["engine"] == "torchtitan"
    assert found["files"] == ["b/torchtitan.toml", "b/torchtitan_plan.py", "b/schedule.csv"]


def test_python_exports_as_the_command_does(folder):
    plan = timeprest.Plan.load("plan.json")
    call("export", "plan.json", "--to", "torchtitan", "-o", "a")
    for path in timeprest.export(plan, "torchtitan", "b"):
        assert path.read_text() == (folder / "a" / path.name).read_text()
    with pytest.raises(FileError, match="isn't overwritten"):
        timeprest.export(plan, "torchtitan", "b")


to_itself = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="torch 2.11's schedules send to a next stage that is on the same rank, and gloo can't",
)


@to_itself
def test_the_script_has_the_profiles_autocast(tmp_path, monkeypatch):
    """In one process: losses are those of the same plan here, and others without it."""
    tiny = "gpt2:layers=2,width=16,heads=2,vocabulary=50,length=8,dropout=0,tied=0"
    how = {"granularity": "h.*", "autocast": "bfloat16", "micro_batch_sizes": [4]}
    profile = timeprest.profile(tiny, batch_size=8, seconds=0.01, **how)
    plan = plan_by_hand(with_times(profile), "gpipe", 2, 2, placement=(0, 0))
    timeprest.export(plan, "torch", tmp_path / "out")
    losses = {}
    for name, autocast in (("own", "profiled"), ("off", "off")):
        how = {"steps": 3, "inline": True, "evaluate": False, "autocast": autocast}
        timeprest.run(plan, tmp_path / name, **how)
        losses[name] = list(read_losses(tmp_path / name / "metrics.jsonl"))
    script, found = str(tmp_path / "out" / "train.py"), tmp_path / "losses.json"
    monkeypatch.setattr(sys, "argv", [script, "--steps", "3", "--losses", str(found)])
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    monkeypatch.setattr(
        dist, "init_process_group", functools.partial(dist.init_process_group, **alone)
    )
    threads = torch.get_num_threads()
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    theirs = json.loads(found.read_text())["losses"]
    assert theirs == pytest.approx(losses["own"], abs=1e-6)
    assert theirs != pytest.approx(losses["off"], abs=1e-5)


def unseen(plan):
    raise TargetError("by-hand: no such target")


@pytest.mark.parametrize("engine", ["torchtitan", "megatron", "deepspeed"])
def test_other_engines_are_told_of_precision(engine):
    names = [f"h.{k}" for k in range(4)]
    edges = [(a, b, a, 8) for a, b in itertools.pairwise(names)]
    profile = profile_by_hand([(name, 64, 1.0, 2.0, 4, ()) for name in names], edges, (1, 2, 4))
    cut = [("h.0", "h.1"), ("h.2", "h.3")]
    plan = plan_by_hand(profile, "pipedream-flush", 2, 4, cut=cut)
    under = msgspec.structs.replace(plan.profile, autocast="bfloat16")
    plain, told = (
        exported(msgspec.structs.replace(plan, profile=each), engine, unseen)
        for each in (plan.profile, under)
    )
    assert plain.files == told.files
    (note,) = set(told.notes) - set(plain.notes)
    assert "autocast (bfloat16)" in note
    scaled = msgspec.structs.replace(plan.profile, autocast="float16")
    with pytest.raises(PlanError, match=r"autocast \(float16\).* with --autocast bfloat16"):
        exported(msgspec.structs.replace(plan, profile=scaled), "torch", None)


SMALL = "width=16,heads=2,vocabulary=50,length=8,dropout=0,tied=0"


@pytest.mark.parametrize(
    ("target", "pattern", "why"),
    [
        (f"gpt2:layers=2,{SMALL}", "h.*", None),
        (f"bert-base:layers=4,{SMALL}", "bert.layer.*", "takes tensor '.*' that the model is giv"),
        ("skips", "layer", "'head' takes tensor 'first.*' of 'first', and a layer there is ca"),
    ],
)
def test_deepspeed_is_given_chains_alone(target, pattern, why, tmp_path):
    """A model input of later layers, and a skip inside a stage, can't be an nn.Sequential."""
    if target == "skips":
        (tmp_path / "skips.py").write_text(SKIPS)
        target = f"{tmp_path / 'skips.py'}:Task"
    profile = timeprest.profile(target, batch_size=4, seconds=0.01, granularity=pattern)
    names = [layer.name for layer in profile.layers]
    blocks = blocks_of(names)
    least = 1 if "first" in names else len(names) // 2
    k = next(k for k in range(least, len(names)) if blocks[k] != blocks[k - 1])
    cut = [tuple(names[:k]), tuple(names[k:])]
    plan = plan_by_hand(with_times(profile), "pipedream-flush", 2, 2, mini_batch=4, cut=cut)
    if why is None:
        assert len(exported(plan, "deepspeed", facts_of).notes) == 1
        return
    with pytest.raises(PlanError, match=why) as refused:
        exported(plan, "deepspeed", facts_of)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_an_edited_plan_is_checked_first(engine, tmp_path):
    """Its edges are of other stages: a stage would be given what another one makes."""
    (tmp_path / "skips.py").write_text(SKIPS)
    profile = timeprest.profile(f"{tmp_path / 'skips.py'}:Task", batch_size=4, seconds=0.01)
    cuts = [[("stem",), ("first", "second", "head")], [("stem", "first"), ("second", "head")]]
    plan, other = (
        plan_by_hand(with_times(profile), "pipedream-flush", 2, 2, mini_batch=4, cut=cut)
        for cut in cuts
    )
    with pytest.raises(PlanError, match="after editing stages, run tp-plan check"):
        exported(msgspec.structs.replace(plan, stages=other.stages), engine, facts_of)


def test_a_compiled_model_is_cut_before_its_own_modules(tmp_path):
    (tmp_path / "compiled.py").write_text(
        f"{FROZEN}\n\nclass Compiled(Task):\n"
        "    def model(self):\n        return torch.compile(super().model(), backend='eager')\n"
    )
    target = f"{tmp_path / 'compiled.py'}:Compiled"
    profile = timeprest.profile(target, batch_size=8, seconds=0.01)
    cut = [("_orig_mod.first", "_orig_mod.relu"), ("_orig_mod.second",)]
    plan = plan_by_hand(with_times(profile), "gpipe", 2, 2, mini_batch=8, cut=cut)
    assert (
        "SPLIT_POINTS = [\n    '_orig_mod.second',"
        in exported(plan, "torch", facts_of).files["train.py"]
    )


@pytest.mark.parametrize("command", [("simulate",), ("export", "--to", "torchtitan", "-o", "out")])
def test_what_was_edited_is_told(command, folder):
    plan = msgspec.structs.replace(timeprest.Plan.load("plan.json"), mini_batch=16)
    write_file("plan.json", plan)
    name, *more = command
    assert "plan.json: edited since it was made" in call(name, "plan.json", *more)


SKIPS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.first, self.second, self.head = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        a = self.first(self.stem(x))
        return self.head(self.second(a)) + a


class Task:
    def model(self):
        return Net()

    def data(self, split):
        return torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 4))

    def loss(self, output, target):
        return nn.functional.mse_loss(output, target)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)
"""


@to_itself
@pytest.mark.processes
@pytest.mark.slow
def test_torch_runs_what_was_written(tmp_path):
    """In a V whose later stages take the model's mask, with split backwards, outputs in a dict and
    targets in another: losses are those of the same plan here."""
    profile = timeprest.profile(BERT, batch_size=8, granularity="bert.layer.*", seconds=0.01)
    names = [layer.name for layer in profile.layers]
    cut = [tuple(names[a:b]) for a, b in itertools.pairwise((0, 5, 6, 8, len(names)))]
    plan = plan_by_hand(with_times(profile), "zb-v", 4, 4, cut=cut, placement=(0, 1, 1, 0))
    theirs, ours = losses_there_and_here(plan, tmp_path, by_torchrun)
    assert theirs == pytest.approx(ours, abs=1e-6)


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_may_have_nothing_to_train_or_begin_in_place_and_samples_be_a_stream(tmp_path):
    (tmp_path / "frozen.py").write_text(FROZEN)
    target = f"{tmp_path / 'frozen.py'}:Task"
    profile = timeprest.profile(target, batch_size=8, seconds=0.01)
    cut = [("first",), ("relu", "second")]
    plan = plan_by_hand(with_times(profile), "gpipe", 2, 2, mini_batch=8, cut=cut)
    theirs, ours = losses_there_and_here(plan, tmp_path)
    assert theirs == pytest.approx(ours, abs=1e-6)


FROZEN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.requires_grad_(False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.second(self.relu(self.first(x)))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(40):
            yield torch.randn(4, generator=generator), torch.randn(4, generator=generator)


class Task:
    def model(self):
        return Net()

    def data(self, split):
        return Stream()

    def loss(self, output, target):
        return nn.functional.mse_loss(output, target)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_each_stage_is_given_what_it_takes(tmp_path):
    """Of samples that are dicts with more in them, and an argument that is a nest: the first stage
    takes one part of it, the second one the other. Another one is called as an argument of torch's
    own. The first stage makes a part of the result, and sends a view, and what has a gradient that
    isn't contiguous."""
    (tmp_path / "nest.py").write_text(NEST)
    target = f"{tmp_path / 'nest.py'}:Task"
    profile = timeprest.profile(target, batch_size=8, seconds=0.01)
    plan = plan_by_hand(with_times(profile), "zb-h1", 2, 2, cut=[("first",), ("second",)])
    theirs, ours = losses_there_and_here(plan, tmp_path)
    assert theirs == pytest.approx(ours, abs=1e-6)


NEST = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, target, unused=None, scales=None):
        near = self.first(target) * scales["of first"]
        auxiliary = near.square()
        far = self.second(near.view(-1, 2, 2)).flatten(1) * scales["of second"][0]
        return {"auxiliary": auxiliary, "none": None, "both": torch.cat([far, near], 1)}


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, k):
        drawn = torch.randn(4, 4, generator=torch.Generator().manual_seed(k))
        scales = {"of second": (drawn[1],), "of first": drawn[2]}
        given = {"scales": scales, "wanted": drawn[0], "target": drawn[3]}
        return {"a_number": torch.tensor(k), **given}


class Task:
    def model(self):
        return Net()

    def data(self, split):
        return Samples()

    def loss(self, output, target):
        apart = output["both"] - target["wanted"].repeat(1, 2)
        return apart.square().mean() + output["auxiliary"].mean()

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)
"""


def by_torchrun(*script):
    """Run a script on two ranks, as users do."""
    words = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *words, *map(str, script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not done.returncode, done.stderr


def by_hand(*script):
    """Run it with what torchrun would tell its ranks."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    where |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [Python(*script, **where, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    for rank in ranks:
        rank.ended()


def losses_there_and_here(plan, folder, start=by_hand):
    """Of three steps: by the script that is written, in processes, and by a run inline."""
    timeprest.export(plan, "torch", folder / "out")
    timeprest.run(plan, folder / "run", steps=3, inline=True, evaluate=False)
    start(folder / "out" / "train.py", "--steps", 3, "--losses", folder / "losses.json")
    theirs = json.loads((folder / "losses.json").read_text())["losses"]
    return theirs, list(read_losses(folder / "run" / "metrics.jsonl"))


@pytest.mark.usefixtures("plugins_forgotten")
def test_plugins_have_other_engines(folder):
    (folder / "mine.py").write_text(
        "from timeprest.planner.exports.engines import EngineFiles\n"
        "ENGINES = {\n"
        "    'mine': lambda plan, look: EngineFiles({'a.txt': plan.variant}),\n"
        "    'none': lambda plan, look: None,\n"
        "    'fails': lambda plan, look: plan.stages[9],\n"
        "}\n"
    )
    said = call("export", "plan.json", "--plugin", "mine.py", "--to", "mine", "-o", "out")
    assert said == "wrote out/a.txt\n"
    assert (folder / "out/a.txt").read_text() == "pipedream-flush"
    said = call("export", "plan.json", "--plugin", "mine.py", "--to", "none", "-o", "other", code=2)
    assert "engine none: gives a NoneType; give EngineFiles" in said
    assert not (folder / "other").exists()
    words = ("export", "plan.json", "--plugin", "mine.py", "--to", "fails", "-o", "other")
    (line,) = call(*words, code=2).splitlines()
    assert re.search(r"mine\.py:5: IndexError: tuple index out of range$", line)
    said = call("export", "plan.json", "--to", "nothing", "-o", "other", code=2)
    assert "'torch', 'torchtitan', 'megatron', 'deepspeed'" in said
