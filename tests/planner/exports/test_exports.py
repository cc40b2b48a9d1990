"""Plans as other engines read them: what is written is what those engines' readers make of it."""

from __future__ import annotations

import copy
import csv
import dataclasses
import io
import itertools
import json
import re
import runpy
import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch
from helpers.by_hand.profiles import chain, profile_by_hand
from helpers.plans import chain_plan, plan_by_hand
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.exports.blocks import blocks_of
from timeprest.planner.exports.export import exported
from timeprest.planner.exports.torch_pipelining import RESULT, ModelFacts
from timeprest.planner.schedules.torch_csv import csv_text
from timeprest.planner.search.solve import solve
from timeprest.planner.systems.operations import Op, Schedule
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles import plugins
from timeprest.profiles.errors import PlanError, ScheduleError, TaskWarning, UserError
from timeprest.profiles.files import tomllib
from timeprest.profiles.profile import SharedParameters, VaryingShapes
from torch import nn

LOOP, V = (0, 1, 0, 1), (0, 1, 1, 0)


@pytest.fixture(scope="module")
def schedules():
    """Torch's own: loading them takes two seconds, which only who runs these tests waits for."""
    from torch.distributed.pipelining import schedules

    return schedules


FLUSHED = [
    ("gpipe", ()),
    ("gpipe", LOOP),
    ("pipedream-flush", ()),
    ("pipedream-flush", V),
    ("zb-h1", ()),
    ("zb-h1", LOOP),
    ("interleaved-1f1b", LOOP),
    ("zb-v", V),
    ("v-half", V),
]


def gpt_plan(cut, variant="pipedream-flush", **more):
    """A plan of a transformer of six blocks with two layers each.

    Args:
        cut: the positions of the stages' first layers but the first's.
    """
    names = ["embed.tokens"]
    names += [f"layers.{k}.{part}" for k in range(6) for part in ("attention", "mlp")]
    names += ["norm", "head"]
    edges = [(a, b, a, 8) for a, b in itertools.pairwise(names)]
    profile = profile_by_hand([(name, 64, 1.0, 2.0, 4, ()) for name in names], edges, (1, 2, 4, 8))
    groups = [tuple(names[a:b]) for a, b in itertools.pairwise((0, *cut, len(names)))]
    return plan_by_hand(profile, variant, len(groups), 4, cut=groups, **more)


def facts(plan, **more):
    names = tuple(name for stage in plan.stages for name in stage.nodes)
    calls = dict.fromkeys(names, 1)
    found = ModelFacts(names, calls, ties=(), one_tensor=True, weighted=False)
    return dataclasses.replace(found, **more)


def export(plan, engine, **more):
    return exported(plan, engine, lambda plan: facts(plan, **more)).files


# torch's schedules -------------------------------------------------------------------------------


def rows_of(text):
    return dict(enumerate(csv.reader(io.StringIO(text))))


def cells_of(text):
    return [cell for row in rows_of(text).values() for cell in row]


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize(("variant", "placement"), FLUSHED)
def test_torch_runs_the_schedule(variant, placement, frozen, schedules):
    """Its own checks, the messages that it adds, and its own walk through all of them.

    Args:
        frozen: stages in front that are given no gradients back here, and wait for none.
    """
    plan = chain_plan(variant, stages=4, n=4, placement=placement)
    edges = [msgspec.structs.replace(e, needs_grad=e.source >= frozen) for e in plan.edges]
    plan = msgspec.structs.replace(plan, edges=tuple(edges))
    text = export(plan, "torch")["schedule.csv"]
    actions = {
        rank: [schedules._Action.from_str(cell) for cell in row]
        for rank, row in rows_of(text).items()
    }
    assert len(cells_of(text)) == len(set(cells_of(text)))
    ranks = max(placement or range(4)) + 1
    found = schedules._validate_schedule(actions, ranks, 4, plan.micro_batches)
    assert found == dict(enumerate(placement or range(4)))
    with_messages = schedules._add_send_recv(actions, found.__getitem__, 4)
    schedules._simulate_comms_compute(with_messages, found.__getitem__, 4)
    kinds = {schedules._Action.from_str(c).computation_type.name for c in cells_of(text)}
    split = {"BACKWARD_INPUT", "BACKWARD_WEIGHT"}
    assert kinds == {"FORWARD"} | (split if VARIANTS[variant].split_backward else {"FULL_BACKWARD"})


def test_a_schedule_in_csv():
    text = export(chain_plan("gpipe", stages=2, n=2), "torch")["schedule.csv"]
    assert text == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    text = export(chain_plan("zb-h1", stages=2, n=2), "torch")["schedule.csv"]
    assert sorted(rows_of(text)[1]) == ["1F0", "1F1", "1I0", "1I1", "1W0", "1W1"]


def test_replicas_run_their_own_micro_batches():
    plan = chain_plan("pipedream-flush", stages=2, n=4, replicas=2)
    files = export(plan, "torch")
    assert files["schedule.csv"] == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert "Schedule1F1B(stages[0], 2, loss_fn=loss_of)" in files["train.py"]
    assert "REPLICAS = 2" in files["train.py"]


def test_one_mini_batch_is_all_that_a_csv_has():
    for ops in ((Op("F", 0, 0), Op("F", 1, 0)), (Op("F", 0, 0), Op("B", 0))):
        with pytest.raises(ScheduleError, match="one mini-batch"):
            csv_text(Schedule((ops,)))


# torch's script ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "placement", "made"),
    [
        ("gpipe", (), "ScheduleGPipe(stages[0], 4,"),
        ("pipedream-flush", (), "Schedule1F1B(stages[0], 4,"),
        ("zb-h1", (), "_PipelineScheduleRuntime(stages, 4,"),
        ("pipedream-flush", V, "_PipelineScheduleRuntime(stages, 4,"),
    ],
)
@pytest.mark.parametrize("one_tensor", [True, False])
def test_the_script_is_python(variant, placement, made, one_tensor):
    plan = chain_plan(variant, stages=4, n=4, placement=placement)
    text = export(plan, "torch", one_tensor=one_tensor)["train.py"]
    compile(text, "train.py", "exec")
    assert made in text
    assert not re.search(r"<\w+>", text)
    assert "SPLIT_POINTS = [\n    'n1',\n    'n2',\n    'n3',\n]" in text
    assert ("schedule.csv" in text) == ("Runtime" in made)


class WithoutGradients(nn.Module):
    """Counts means in a buffer, and takes a factor of its weights, both under torch.no_grad."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
            factor = self.linear.weight.mean()
        return (y - self.mean) * factor


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torch_splits_what_runs_without_gradients(monkeypatch, tmp_path):
    """As rotary embeddings do in Hugging Face's models: torch alone loses their graphs."""
    script = tmp_path / "train.py"
    script.write_text(export(chain_plan("gpipe", stages=2), "torch")["train.py"])
    from torch.distributed.pipelining import SplitPoint, pipeline

    found = runpy.run_path(str(script))
    monkeypatch.setattr(torch.export, "export", found["inlining"](torch.export.export))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), WithoutGradients(), nn.ReLU(), nn.Linear(3, 3))
    x = torch.randn(4, 3)
    pipe = pipeline(copy.deepcopy(plain), (x,), {}, {"2": SplitPoint.BEGINNING})
    stages = [pipe.get_stage_module(s) for s in range(2)]
    for model in (plain, lambda given: stages[1](stages[0](given))):
        for _ in range(2):
            model(x).square().sum().backward()
    split = {n: p.grad for stage in stages for n, p in stage.named_parameters()}
    assert all(torch.allclose(split[n], p.grad) for n, p in plain.named_parameters())
    assert torch.equal(stages[0].get_buffer("1.mean"), plain[1].mean)


def test_torchs_1f1b_wants_a_micro_batch_for_each_stage():
    text = export(chain_plan("pipedream-flush", stages=4, n=2), "torch")["train.py"]
    assert "_PipelineScheduleRuntime(stages, 2," in text
    files = export(gpt_plan((3, 5, 7, 9, 11)), "torchtitan")
    found = tomllib.loads(files["torchtitan.toml"])["parallelism"]
    assert found["pipeline_parallel_schedule"] == "PipelineScheduleMulti"
    assert found["pipeline_parallel_schedule_csv"] in files


def test_what_torch_cuts_is_the_sequence_of_modules():
    plan = chain_plan("gpipe", stages=3)
    for more, why in (
        ({"layers": ("n0", "n2", "n1")}, "'n1' of stage 1 runs behind 'n2' of stage 2"),
        ({"calls": {"n0": 1, "n1": 2, "n2": 1}}, "stage 1 begins with 'n1', which is called 2"),
        ({"calls": {"n0": 1, "n1": 1}}, "stage 2 begins with 'n2', which isn't a module"),
        ({"ties": [["n0", "n2"]]}, "'n0', 'n2' share parameters and are on stages 0, 2"),
        ({"weighted": True}, "a sum and a weight"),
        ({"in_session": True}, "is in no file"),
        ({"taken": (("mask", "", RESULT),)}, "has its own input 'mask' in it"),
    ):
        with pytest.raises(PlanError, match=re.escape(why)):
            export(plan, "torch", **more)


def test_hooks_that_the_script_leaves_out_are_named():
    plan = chain_plan("gpipe", stages=2)
    with pytest.warns(TaskWarning, match="doesn't call the task's scheduler"):
        found = exported(plan, "torch", lambda plan: facts(plan, unused_hooks=("scheduler",)))
    assert "torchrun --nproc-per-node 2 {folder}/train.py" in found.notes[0]


# torchtitan --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = nn.Identity(), nn.Identity()


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.layers = nn.ModuleDict({str(k): Block() for k in range(6)})
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 4)


def keep(model, names):
    """What torchtitan does for a stage, by the docstring of its own splitting: children that are
    named stay, and of those that are lists the named entries."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.ModuleDict):
            for key in list(child):
                if f"{name}.{key}" not in names:
                    del child[key]
        elif name not in names:
            setattr(model, name, None)


def test_torchtitan_keeps_each_stages_modules():
    plan = gpt_plan((5, 9))
    files = export(plan, "torchtitan")
    asked = tomllib.loads(files["torchtitan.toml"])
    parallelism = asked["parallelism"]
    assert parallelism["module_fqns_per_model_part"] == [
        ["embed", "layers.0", "layers.1"],
        ["layers.2", "layers.3"],
        ["layers.4", "layers.5", "norm", "head"],
    ]
    for stage, names in zip(plan.stages, parallelism["module_fqns_per_model_part"], strict=True):
        model = Gpt()
        keep(model, names)
        modules = dict(model.named_modules())
        left = {name for name, module in modules.items() if name and not list(module.children())}
        wanted = {name.replace("embed.tokens", "embed") for name in stage.nodes}
        assert left - {"layers"} == wanted
    assert parallelism["pipeline_parallel_degree"] == 3
    assert parallelism["pipeline_parallel_schedule"] == "1F1B"
    assert "pipeline_parallel_schedule_csv" not in parallelism
    assert parallelism["pipeline_parallel_microbatch_size"] == 2
    assert asked["training"]["local_batch_size"] == 8


@pytest.mark.parametrize(
    ("variant", "placement", "csv"),
    [("gpipe", (), False), ("zb-h1", (), True), ("v-half", V, True)],
)
def test_torchtitans_two_formats_say_the_same(variant, placement, csv, tmp_path):
    """Batches in samples and micro-batches in TOML, in tokens and as a count in Python."""
    plan = gpt_plan((5, 7, 9), variant, placement=placement)
    for name, text in export(plan, "torchtitan").items():
        (tmp_path / name).write_text(text)
    toml = tomllib.loads((tmp_path / "torchtitan.toml").read_text())
    config = SimpleNamespace(
        training=SimpleNamespace(max_context_length=64), parallelism=SimpleNamespace()
    )
    module = runpy.run_path(str(tmp_path / "torchtitan_plan.py"))
    assert module["with_plan"](config) is config
    assert ("Path" in module) == csv
    said, asked = vars(config.parallelism), toml["parallelism"]
    assert said.pop("pipeline_parallel_layers_per_stage") is None
    found = said.pop("pipeline_parallel_schedule_csv")
    assert found == (str(tmp_path / "schedule.csv") if csv else "")
    assert asked.pop("pipeline_parallel_schedule_csv", "") == ("schedule.csv" if csv else "")
    size, count = asked.pop("pipeline_parallel_microbatch_size"), said.pop("num_pp_microbatches")
    assert said == asked
    assert size * count == toml["training"]["local_batch_size"]
    assert config.training.num_tokens_per_microbatch_per_dp_rank == 64 * size
    replicas = asked["data_parallel_replicate_degree"]
    assert config.training.num_tokens_per_train_step == 64 * size * count * replicas
    # Release 0.3 counts samples, and its settings have no other fields.
    samples = SimpleNamespace(
        training=SimpleNamespace(local_batch_size=8), parallelism=SimpleNamespace()
    )
    module["with_plan"](samples)
    assert vars(samples.training) == {
        "local_batch_size": toml["training"]["local_batch_size"],
        "global_batch_size": size * count * replicas,
        "disable_cuda_graphs": True,
    }
    assert samples.parallelism.pipeline_parallel_microbatch_size == size
    assert not hasattr(samples.parallelism, "num_pp_microbatches")


def test_a_modules_second_call_is_in_its_block():
    """So is a module that is called as the result is."""
    names = ["embed", "layers.0.norm", "layers.0.norm@2", "layers.1", "output@2"]
    assert blocks_of(names) == ["embed", "layers.0", "layers.0", "layers.1", "output"]


@pytest.mark.parametrize(
    ("variant", "placement", "name"),
    [
        ("zb-h1", (), "PipelineScheduleMulti"),
        ("interleaved-1f1b", LOOP, "Interleaved1F1B"),
        ("v-half", V, "ZBVZeroBubble"),
    ],
)
def test_torchtitan_is_given_other_schedules_as_csv(variant, placement, name, schedules):
    files = export(gpt_plan((5, 7, 9), variant, placement=placement), "torchtitan")
    found = tomllib.loads(files["torchtitan.toml"])["parallelism"]
    assert found["pipeline_parallel_schedule"] == name
    assert schedules.get_schedule_class(name)
    assert found["pipeline_parallel_schedule_csv"] in files
    assert found["pipeline_parallel_degree"] == len(rows_of(files["schedule.csv"]))


# Megatron-Core -----------------------------------------------------------------------------------


def read_layout(text, ranks):
    """A reader of our own, from the documentation of --pipeline-model-parallel-layout: commas are
    for the eye, ``(…)*n`` and ``x*n`` repeat, ``|`` parts stages, and stage s is on rank s mod
    ranks. Per rank, its stages' letters."""
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    stages = text.split("|")
    assert len(stages) % ranks == 0
    assert set(text) <= set("Etm|L")
    assert "".join(stages).strip("t") == "EL" or "".join(stages)[0] + text[-1] == "EL"
    return [stages[rank::ranks] for rank in range(ranks)]


def arguments_of(files):
    words = files["arguments.txt"].split()
    return dict(zip(words[::2], words[1::2], strict=True))


def test_that_reader_reads_the_documentations_own_example():
    found = read_layout("Et*3|(tt|)*29,m|L", 16)
    assert found[0] == ["Ettt", "tt"]
    assert found[13] == ["tt", "tt"]
    assert found[14] == ["tt", "m"]
    assert found[15] == ["tt", "L"]


def test_megatron_reads_the_layout():
    asked = arguments_of(export(gpt_plan((5, 9)), "megatron"))
    ranks = int(asked["--pipeline-model-parallel-size"])
    found = read_layout(asked["--pipeline-model-parallel-layout"], ranks)
    assert found == [["Ett"], ["tt"], ["ttL"]]
    assert asked["--num-layers"] == "6"
    assert (asked["--micro-batch-size"], asked["--global-batch-size"]) == ("2", "8")


def test_megatrons_ranks_have_stages_in_a_loop():
    plan = gpt_plan((5, 7, 13), "interleaved-1f1b", placement=LOOP)
    asked = arguments_of(export(plan, "megatron"))
    assert read_layout(asked["--pipeline-model-parallel-layout"], 2) == [
        ["Ett", "ttt"],
        ["t", "L"],
    ]


def test_megatron_sums_the_gradients_of_shared_parameters():
    plan = gpt_plan((5, 9))
    first = msgspec.structs.replace(plan.predicted.stages[0], all_reduce_s=1.0)
    stages = (first, *plan.predicted.stages[1:])
    predicted = msgspec.structs.replace(plan.predicted, stages=stages)
    tied = msgspec.structs.replace(plan, predicted=predicted)
    assert export(tied, "megatron") == export(plan, "megatron")
    for engine in set(plugins.names("engines")) - {"megatron"}:
        with pytest.raises(PlanError, match="stage 0 shares parameters with another stage"):
            export(tied, engine)


def test_megatrons_stages_make_masks_themselves():
    plan = gpt_plan((5, 9))
    mask = msgspec.structs.replace(plan.edges[0], tensor="mask", target=2, needs_grad=False)
    masked = msgspec.structs.replace(plan, edges=(*plan.edges, mask))
    assert export(masked, "megatron") == export(plan, "megatron")
    with pytest.raises(PlanError, match=r"'mask' skips from stage 0 to stage 2.*--to megatron"):
        export(masked, "deepspeed")
    skips = msgspec.structs.replace(mask, needs_grad=True)
    with pytest.raises(PlanError, match="'mask' skips from stage 0 to stage 2"):
        export(msgspec.structs.replace(plan, edges=(*plan.edges, skips)), "megatron")


# DeepSpeed ---------------------------------------------------------------------------------------


class LayerSpec:
    """As DeepSpeed documents it: what makes a layer, made where it is needed."""

    def __init__(self, kind, *args):
        self.build = lambda: kind(*args)


class PipelineModule:
    """As DeepSpeed documents it, of equal counts: as many layers on each stage."""

    def __init__(self, layers, num_stages, partition_method, loss_fn=None):
        assert partition_method == "uniform"
        each, rest = divmod(len(layers), num_stages)
        assert not rest
        self.stages = [
            [layer.build() for layer in layers[k * each : (k + 1) * each]]
            for k in range(num_stages)
        ]
        self.loss_fn = loss_fn


@pytest.fixture
def deepspeed(monkeypatch):
    """A stand-in for deepspeed.pipe."""
    pipe = SimpleNamespace(LayerSpec=LayerSpec, PipelineModule=PipelineModule)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(pipe=pipe))
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", pipe)


def test_deepspeed_has_the_plans_stages(deepspeed):
    files = export(gpt_plan((5, 9)), "deepspeed")
    made = {}
    exec(compile(files["pipeline_module.py"], "pipeline_module.py", "exec"), made)
    names = [name for stage in made["STAGES"] for name in stage]
    layers = {name: nn.Linear(1, 1) for name in names}
    layers["head"] = LayerSpec(nn.Linear, 1, 2)
    net = made["pipeline_module"](layers, loss_fn=print)
    assert [len(stage) for (stage,) in net.stages] == [3, 2, 4]
    assert net.stages[1][0][0] is layers["layers.2"]
    assert net.stages[2][0][-1].out_features == 2
    assert net.loss_fn is print
    assert json.loads(files["ds_config.json"]) == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    }
    with pytest.raises(ValueError, match="norm"):
        made["pipeline_module"]({name: layers[name] for name in names if name != "norm"})


# What they can't express -------------------------------------------------------------------------


def skipping():
    """A plan of a chain whose first layer's tensor goes to its last layer too."""
    names = ["a", "b", "c"]
    edges = [("a", "b", "t", 8), ("b", "c", "u", 8), ("a", "c", "t", 8)]
    profile = profile_by_hand([(name, 64, 1.0, 2.0, 4, ()) for name in names], edges, (1, 2, 4))
    return plan_by_hand(profile, "gpipe", 3, 2, mini_batch=4)


def test_torch_runs_several_stages_on_one_device():
    """As it does in one process."""
    files = export(gpt_plan((9,), "pipedream-flush", placement=(0, 0)), "torch")
    assert "STAGES_OF_RANK = [[0, 1]]" in files["train.py"]


def replaced(plan, **stage):
    first, *others = plan.stages
    return msgspec.structs.replace(plan, stages=(msgspec.structs.replace(first, **stage), *others))


@pytest.mark.parametrize("engine", plugins.names("engines"))
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (lambda: chain_plan("timeprest"), "timeprest never flushes"),
        (lambda: chain_plan("pipedream-flush", stages=1), "there is no pipeline"),
        (lambda: plan_by_hand(chain(3), "pipedream-flush", 3, 4, mini_batch=6), "don't divide"),
        (
            lambda: plan_by_hand(chain(3), "pipedream-flush", 3, 4, update_every=2),
            "made of 2 mini-batches",
        ),
        (
            lambda: plan_by_hand(chain(2), "pipedream-flush", 2, 4, replicas=(2, 1)),
            "2, 1 replicas",
        ),
        (
            lambda: replaced(chain_plan("pipedream-flush"), recompute=True),
            "stage 0 computes activations again",
        ),
    ],
)
def test_what_no_engine_has_is_refused(engine, plan, why):
    with pytest.raises(PlanError, match=why) as refused:
        export(plan(), engine)
    assert "\n" not in str(refused.value)
    assert "can't run this plan: " in str(refused.value)


@pytest.mark.parametrize(
    ("engine", "plan", "why"),
    [
        ("torch", skipping, "tensor 't' skips from stage 0 to stage 2"),
        ("torchtitan", skipping, "tensor 't' skips from stage 0 to stage 2"),
        ("torch", lambda: varying(chain_plan("gpipe")), "mini-batches differ in shape, and there"),
        ("torchtitan", lambda: gpt_plan((4, 9)), "'layers.1' is cut inside.*'layers.\\*'"),
        ("megatron", lambda: gpt_plan((4, 9)), "'layers.1.mlp' is on stage 1, others on stage 0"),
        ("deepspeed", lambda: gpt_plan((4, 9)), "'layers.1' is cut inside"),
        ("megatron", lambda: gpt_plan((5,), "gpipe"), "no schedule like gpipe's"),
        ("deepspeed", lambda: gpt_plan((5,), "zb-h1"), "plan with --variant pipedream-flush$"),
        (
            "deepspeed",
            lambda: gpt_plan((5, 7, 9), "pipedream-flush", placement=LOOP),
            "placed loop; plan with --stages-per-device 1",
        ),
        (
            "megatron",
            lambda: gpt_plan((5, 7, 9), "pipedream-flush", placement=V),
            "placed v; plan with --placement loop",
        ),
        (
            "torch",
            lambda: chain_plan("gpipe", placement=(0, 1, 0)),
            "different numbers of stages|placed",
        ),
        *(
            (
                engine,
                lambda: gpt_plan((9,), "pipedream-flush", placement=(0, 0)),
                "all its 2 stages are on one device, and there .* plan with --devices 2 or more$",
            )
            for engine in ("torchtitan", "megatron", "deepspeed")
        ),
        ("megatron", lambda: chain_plan("pipedream-flush"), "in no list of transformer blocks"),
        (
            "megatron",
            lambda: renamed(gpt_plan((5, 9)), "layers.0", "encoder.0"),
            "several lists, 'encoder', 'layers'",
        ),
        (
            "megatron",
            lambda: renamed(chain_plan("pipedream-flush"), "n", ""),
            "the model is itself a list of layers, which are taken for an embedding",
        ),
        (
            "megatron",
            lambda: renamed(gpt_plan((5, 9)), "layers.2.mlp", "bridge"),
            "'bridge' comes between its blocks",
        ),
        ("megatron", lambda: gpt_plan((1, 13, 14)), "'norm' comes behind the blocks on stage 2"),
        (
            "megatron",
            lambda: renamed(gpt_plan((1, 3)), "layers.0", "stem"),
            "'stem' comes before the blocks on stage 1",
        ),
        (
            "torchtitan",
            lambda: renamed(gpt_plan((5, 9)), "layers.", "model.layers."),
            "'model.layers.0' on stage 0 is no child",
        ),
        (
            "torchtitan",
            lambda: renamed(gpt_plan((5, 9)), "layers.", ""),
            "'0' on stage 0: the model is itself a list",
        ),
        ("deepspeed", lambda: two_tensors(), "stage 1 receives 2 tensors \\('t', 'u'\\)"),
    ],
)
def test_what_one_engine_lacks_is_refused(engine, plan, why):
    with pytest.raises(PlanError, match=why):
        export(plan(), engine)


def renamed(plan, old, new):
    """The plan with other names of layers."""
    return msgspec.structs.replace(
        plan,
        stages=tuple(
            msgspec.structs.replace(stage, nodes=tuple(n.replace(old, new) for n in stage.nodes))
            for stage in plan.stages
        ),
    )


def varying(plan):
    """The plan, of a profile whose mini-batches differ in length."""
    shapes = VaryingShapes(profiled=((8,),), least=((4,),), most=((8,),), batches=2)
    return msgspec.structs.replace(
        plan, profile=msgspec.structs.replace(plan.profile, varying=shapes)
    )


def two_tensors():
    names = ["a", "b", "c"]
    edges = [("a", "b", "t", 8), ("a", "c", "t", 8), ("b", "c", "u", 8)]
    profile = profile_by_hand([(name, 64, 1.0, 2.0, 4, ()) for name in names], edges, (1, 2, 4))
    cut = [("a", "b"), ("c",)]
    return plan_by_hand(profile, "pipedream-flush", 2, 2, mini_batch=4, cut=cut)


def test_other_engines_are_refused():
    with pytest.raises(UserError, match="torch, torchtitan, megatron, deepspeed"):
        export(chain_plan("gpipe"), "gpipe")


# Blocks ------------------------------------------------------------------------------------------


def test_blocks_are_entries_of_the_models_own_lists():
    names = ["transformer.wte", "transformer.h.0.attn.qkv", "transformer.ln_f", "head"]
    assert blocks_of(names) == ["transformer.wte", "transformer.h.0", "transformer.ln_f", "head"]
    assert blocks_of(["0", "1.conv", "1.bn"]) == ["0", "1", "1"]
    assert blocks_of(["stem.conv", "layer1.0.downsample.0", "head.proj"]) == [
        "stem",
        "layer1.0",
        "head",
    ]


def test_a_list_runs_in_its_sequence():
    swapped = renamed(renamed(renamed(gpt_plan((5, 9)), ".1.", ".x."), ".4.", ".1."), ".x.", ".4.")
    with pytest.raises(PlanError, match=r"'layers.2' is on stage 1, behind 'layers.4' of stage 0"):
        export(swapped, "megatron")


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("engine", ["torchtitan", "deepspeed"])
def test_copies_of_tied_parameters_are_refused_with_replicas_too(engine, devices):
    names = ["emb", "h.0", "h.1", "h.2", "h.3", "head"]
    edges = [(a, b, f"t{a}", 16) for a, b in itertools.pairwise(names)]
    profile = profile_by_hand([(n, 1000, 1e-3, 2e-3, 10, ()) for n in names], edges)
    shared = (SharedParameters(layers=("emb", "head"), parameter_bytes=1000),)
    profile = msgspec.structs.replace(profile, shared=shared)
    asked = {"stages": 2, "micro_batches": 4, "tied": "split", "replicas": devices > 2}
    plan = solve(profile, uniform_cluster(devices), "pipedream-flush", **asked)
    assert [len(stage.devices) for stage in plan.stages] == [devices // 2] * 2
    with pytest.raises(PlanError, match=r"nobody sums their gradients; untie .* --to megatron"):
        export(plan, engine)
