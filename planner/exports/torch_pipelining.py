"""torch.distributed.pipelining: split points by module name, the schedule, a script that trains.

The script lets ``torch.distributed.pipelining.pipeline`` trace the model and split it before the
first module of each stage but the first. GPipe and 1F1B are classes of torch's; every other
schedule goes as CSV into the runtime that torch's own looped and zero-bubble schedules use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from ...profiles.errors import TaskWarning
from ..plan import Plan
from .engines import TORCHS, UNTIE, Engine, EngineFiles, ranks_of
from .schedule import schedule_csv

TORCH = Engine(
    "torch.distributed.pipelining", TORCHS, placements=frozenset({"loop", "v"}), one_device=True
)

RESULT = "output"
"""Who takes what the model gives."""

SCRIPT, CSV = "train.py", "schedule.csv"


@dataclass(frozen=True)
class ModelFacts:
    """What has to be known of the model itself.

    Attributes:
        layers: in the sequence in which they run.
        calls: for each layer whose name is a module's, how often a forward calls that.
        ties: groups of layers that share parameters.
        one_tensor: whether its result is one tensor.
        weighted: whether the loss gives a sum and a weight.
        unused_hooks: hooks of the task that the script doesn't call.
        in_session: whether this Python session alone has it.
        taken: of each tensor that a layer takes from elsewhere its name, the layer that makes it
            ("": an input of the model) and the one that takes it (RESULT: what the model gives).
    """

    layers: tuple[str, ...]
    calls: Mapping[str, int]
    ties: Sequence[Sequence[str]]
    one_tensor: bool
    weighted: bool
    unused_hooks: tuple[str, ...] = ()
    in_session: bool = False
    taken: tuple[tuple[str, str, str], ...] = ()


def for_torch(plan: Plan, look: Callable[[Plan], ModelFacts]) -> EngineFiles:
    """Script and schedule.

    Args:
        look: sees what has to be known of the model.

    Raises PlanError where torch can't express the plan.
    """
    TORCH.check(plan)
    if plan.profile.autocast == "float16":
        raise TORCH.refuse(
            "it was profiled under autocast (float16), which trains with scaled losses alone, and "
            "the script scales none; profile with --autocast bfloat16, or without"
        )
    if plan.profile.varying is not UNSET:
        raise TORCH.refuse(
            "its mini-batches differ in shape, and there stages are traced for one shape; have "
            "the data give all samples one length"
        )
    facts = look(plan)
    points = split_points(plan, facts)
    if facts.weighted:
        raise TORCH.refuse(
            "the task's loss gives a sum and a weight, and there each micro-batch's loss is a mean"
        )
    for tensor, producer, consumer in facts.taken:
        if not producer and consumer == RESULT:
            raise TORCH.refuse(
                f"the model's result has its own input {tensor!r} in it, and there results are "
                "what stages make; have the loss take that from the target"
            )
    if facts.in_session:
        raise TORCH.refuse(
            f"{plan.profile.target} is in no file, and the script's processes make it for "
            "themselves; put it in a file, and profile that"
        )
    if facts.unused_hooks:
        hooks = " and ".join(facts.unused_hooks)
        line = f"the script doesn't call the task's {hooks}: add what they do"
        warnings.warn(line, TaskWarning, stacklevel=2)
    start = f"start it: torchrun --nproc-per-node {plan.workers} {{folder}}/{SCRIPT}"
    files = {SCRIPT: _script(plan, points, facts), CSV: schedule_csv(plan)}
    return EngineFiles(files, (start,))


def split_points(plan: Plan, facts: ModelFacts) -> list[str]:
    """The module that each stage but the first begins with.

    Raises PlanError where a stage doesn't begin with a module that is called once, its layers
    don't run one after another, or it shares parameters with another stage.
    """
    stage_of = {name: s for s, stage in enumerate(plan.stages) for name in stage.nodes}
    points: list[str] = []
    before = facts.layers[0]
    for name in facts.layers:
        s, last = stage_of[name], stage_of[before]
        if s < last:
            raise TORCH.refuse(
                f"layer {name!r} of stage {s} runs behind {before!r} of stage {last}, and there "
                f"the model is cut in the sequence in which it runs; plan with --pin {before}={s} "
                f"or --pin {name}={last}"
            )
        if s > last:
            points.append(name)
        before = name
    for s, name in enumerate(points, start=1):
        called = facts.calls.get(name, 0)
        if called != 1:
            why = "isn't a module of the model" if not called else f"is called {called} times"
            raise TORCH.refuse(
                f"stage {s} begins with {name!r}, which {why}, and there cuts are before modules "
                "that are called once; profile with --granularity layer or with patterns of names"
            )
    for group in facts.ties:
        stages = sorted({stage_of[name] for name in group})
        if len(stages) > 1:
            raise TORCH.refuse(
                f"layers {', '.join(map(repr, group))} share parameters and are on stages "
                f"{', '.join(map(str, stages))}, {UNTIE}"
            )
    return points


def _script(plan: Plan, points: Sequence[str], facts: ModelFacts) -> str:
    ranks, replicas = ranks_of(plan), len(plan.stages[0].devices)
    micro_batches = plan.micro_batches // replicas
    if name := TORCH.class_of(plan):
        imported = (
            "from torch.distributed.pipelining import "
            f"PipelineStage, Schedule{name}, SplitPoint, pipeline"
        )
        made = f"Schedule{name}(stages[0], {micro_batches}, loss_fn=loss_of)"
        loaded = ""
    else:
        imported = (
            "from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline\n"
            "from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime"
        )
        made = f"_PipelineScheduleRuntime(stages, {micro_batches}, loss_fn=loss_of)"
        loaded = f'    schedule._load_csv(str(Path(__file__).with_name("{CSV}")))\n'
    values = {
        "target": repr(plan.profile.target),
        "mini_batch": str(plan.mini_batch),
        "micro_batches": str(plan.micro_batches),
        "points": _lines(points),
        "ranks": repr(ranks),
        "replicas": str(replicas),
        "threads": str(plan.profile.threads),
        "processes": str(plan.workers),
        "system": plan.variant,
        "imported": imported,
        "made": made,
        "loaded": loaded,
        "path": "" if name else "from pathlib import Path\n",
        "result": _PLAIN if facts.one_tensor else _NESTED,
        "copy": "" if facts.one_tensor else "import copy\n",
        "summed": _SUMMED if replicas > 1 else "",
        **_precision(plan.profile.autocast),
    }
    text = _TEXT
    for key, value in values.items():
        text = text.replace(f"<{key}>", value)
    return text


def _precision(autocast: str | None) -> dict[str, str]:
    """What forwards and losses run under, in the script: as a run here (`forward_context`)."""
    lines = {
        "run": (8, "output = self.inner(**given)"),
        "traced": (4, "pipe = pipeline(model, part(args, rows), part(kwargs, rows), split_spec)"),
        "lost": (8, "return loss(rebuilt(output), part(target, rows))"),
    }
    if autocast is None:
        found = {key: f"{' ' * indent}{line}\n" for key, (indent, line) in lines.items()}
        return {**found, "autocast": "", "precision": ""}
    found = {
        key: f"{' ' * indent}with precision():\n{' ' * indent}    {line}\n"
        for key, (indent, line) in lines.items()
    }
    return {**found, "autocast": f"AUTOCAST = torch.{autocast}\n", "precision": _AUTOCAST}


def _lines(names: Sequence[str]) -> str:
    return "[\n" + "".join(f"    {name!r},\n" for name in names) + "]"


_PLAIN = """    def rebuilt(output):
        return output
"""
_NESTED = """    # Stages give tensors alone: how the model nests them is seen on a copy of it.
    with torch.no_grad():
        result = copy.deepcopy(model)(*part(args, rows), **part(kwargs, rows))

    def rebuilt(output):
        tensors = iter(output if isinstance(output, (list, tuple)) else [output])
        return tree_map_only(torch.Tensor, lambda _: next(tensors), result)
"""
_AUTOCAST = """def precision():
    # The plan was profiled so. Without a cache, since that may outlive an update.
    return torch.autocast(DEVICE.type, AUTOCAST, cache_enabled=False)


"""
_SUMMED = """        for p in parameters:
            if p.grad is not None:
                dist.all_reduce(p.grad, group=mesh.get_group("replicas"))
                p.grad /= REPLICAS
"""

_TEXT = '''"""Trains by a plan with torch.distributed.pipelining; written by tp-plan export.

    torchrun --nproc-per-node <processes> train.py --steps 100

The model, its data, loss and optimizer come from the plan's target, through timeprest. To do
without it, write `task` anew. The plan's system is <system>. On GPUs: the backend "nccl" in the
place of "gloo", and DEVICE = torch.device("cuda", local rank).
"""

import argparse
<copy>import json
import operator
import statistics
import time
<path>
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
<imported>
from torch.utils._pytree import tree_leaves, tree_map_only

TARGET = <target>
MINI_BATCH = <mini_batch>
MICRO_BATCHES = <micro_batches>
SPLIT_POINTS = <points>
STAGES_OF_RANK = <ranks>
REPLICAS = <replicas>
<autocast>THREADS = <threads>
DEVICE = torch.device("cpu")


def task(seed):
    """What to train.

    Returns the model; its batches, (arguments, arguments by name, target) of each step; the loss
    of an output and a target, a mean over samples; and what makes an optimizer of parameters.
    """
    from timeprest.profiles.target import resolve
    from timeprest.runtime.prepare.samples import Samples

    found = resolve(TARGET)
    call, _ = found.call(1)
    samples = Samples(found.task, "train", MINI_BATCH, seed, call.names, MINI_BATCH)
    in_epoch = samples.size // MINI_BATCH

    def batch(step):
        epoch, k = divmod(step, in_epoch) if in_epoch else (0, step)  # a stream goes on
        tensors, target = samples.take(epoch, range(k * MINI_BATCH, (k + 1) * MINI_BATCH))
        args, kwargs = call.arguments(tensors)
        return tuple(args), kwargs, target

    return found.model(seed), batch, found.task.loss, found.task.optimizer


class Stage(nn.Module):
    """A stage of the traced model, called with what the one before gave.

    Inputs of the model are given to the stages that take them, by name.

    Attributes:
        own: its name for each of those, and the traced model's.
        takes, gives: tensors like those of its calls, so that nothing is run to learn shapes.
    """

    def __init__(self, pipe, s):
        super().__init__()
        calls = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
        self.inner = pipe.get_stage_module(s)
        # The first one's takes arguments as they were nested.
        self.inner.graph.set_codegen(torch.fx.graph.CodeGen())
        self.inner.recompile()
        inside = [node for node in self.inner.graph.nodes if node.op == "placeholder"]
        sources = dict(zip(inside, calls[s].args, strict=True))
        self.received = [node.target for node in inside if sources[node].op != "placeholder"]
        self.own = {n.target: keyword(sources[n]) for n in inside if n.target not in self.received}
        graphs = [m.graph for m in self.inner.modules() if hasattr(m, "graph")]
        self.in_place = any(writes(node) for graph in graphs for node in graph.nodes)
        messages = [[n for n in call.args if n.op != "placeholder"] for call in calls]
        result = tree_leaves(pipe.split_gm.graph.output_node().args[0])
        result = [node for node in result if isinstance(node, torch.fx.Node)]
        # What an earlier stage makes of the result goes through the last one.
        messages[-1] += dict.fromkeys(
            node for node in result if node not in messages[-1] and source(node) != calls[-1]
        )
        outputs = {
            call: tree_leaves(pipe.get_stage_module(k).graph.output_node().args[0])
            for k, call in enumerate(calls)
        }
        takes, gives = messages[s], [*messages, result][s + 1]
        own = len(outputs[calls[s]])
        self.picked = [own + takes.index(n) if n in takes else place(n) for n in gives]
        self.takes = tuple(like(outputs[source(n)][place(n)]) for n in takes)
        self.gives = tuple(like(outputs[source(n)][place(n)]) for n in gives)

    def forward(self, *args, **named):
        own = {name: named[root] for name, root in self.own.items()}
        # Autograd refuses to write to what was received.
        args = [each.clone() if self.in_place else each.view_as(each) for each in args]
        for each in args:
            if each.requires_grad:
                each.register_hook(torch.Tensor.contiguous)  # as gloo wants messages
        given = {**dict(zip(self.received, args, strict=False)), **own}
<run>        leaves = [*tree_leaves(output), *args]
        picked = tuple(message(leaves[k]) for k in self.picked)
        return picked if len(picked) > 1 else picked[0]


<precision>def inlining(export):
    """torch.export.export, but for what a model runs under torch.no_grad: that is a graph of its
    own there, which is lost where modules are split, and is put into the model's own."""

    def exported(*args, **kwargs):
        program = export(*args, **kwargs)
        inline(program.graph_module)
        return program

    return exported


def inline(traced):
    """Put what a traced graph runs under torch.no_grad into it, cut off from gradients."""
    graph = traced.graph
    for call in list(graph.nodes):
        if call.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        enabled, held, *given = call.args
        inner = getattr(traced, held.target)
        inline(inner)
        with graph.inserting_before(call):
            given = given if enabled else [cut_off(node, call) for node in given]
            takes = [node for node in inner.graph.nodes if node.op == "placeholder"]
            made = graph.graph_copy(inner.graph, dict(zip(takes, given, strict=True)))
        for user in list(call.users):
            user.replace_all_uses_with(made[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(call)
        if not held.users:
            graph.erase_node(held)
    traced.recompile()


def cut_off(node, call):
    """A value without its gradient, as a module's call in a traced graph takes it."""
    if not isinstance(node.meta["val"], torch.Tensor):
        return node
    found = node.graph.call_function(torch.ops.aten.detach.default, (node,))
    found.meta = {**call.meta, "val": node.meta["val"]}
    return found


def writes(node):
    """Whether a node of a traced graph writes to what its module was given, as in-place ReLUs."""
    mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return mutable and any(source.op == "placeholder" for source in node.all_input_nodes)


def keyword(node):
    """A name for an input of the model that is no argument of a schedule's step, like target."""
    return f"input {node.name}"


def source(node):
    """The call of a stage that makes what a node of the split model's graph stands for."""
    return node.args[0] if node.target is operator.getitem else node


def place(node):
    """Where that is among what the stage gives."""
    return node.args[1] if node.target is operator.getitem else 0


def message(tensor):
    """As gloo wants it, and no view: schedules that split backwards detach it in place."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor._is_view() else tensor


def like(node):
    """A tensor like the one that a node of a traced graph gives."""
    value = node.meta["val"]
    empty = torch.empty(value.shape, dtype=value.dtype, device=DEVICE)
    return empty.requires_grad_(value.is_floating_point())


def part(value, rows):
    """These rows of every tensor in a nest."""
    return tree_map_only(torch.Tensor, lambda leaf: leaf[rows], value)


def main():
    parser = argparse.ArgumentParser(description="Train by a plan with torch's pipelining.")
    parser.add_argument("--steps", type=int, default=10, help="mini-batches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", help="a JSON file for the losses and seconds of all steps")
    asked = parser.parse_args()
    torch.set_num_threads(THREADS)
    dist.init_process_group("gloo")
    ranks = len(STAGES_OF_RANK)
    if dist.get_world_size() != ranks * REPLICAS:
        raise SystemExit(f"start {ranks * REPLICAS} processes, not {dist.get_world_size()}")
    mesh = init_device_mesh(DEVICE.type, (ranks, REPLICAS), mesh_dim_names=("stages", "replicas"))
    rank, replica = mesh.get_coordinate()
    mine = STAGES_OF_RANK[rank]
    last = len(SPLIT_POINTS) in mine

    model, batch, loss, make_optimizer = task(asked.seed)
    model.train()
    args, kwargs, _ = batch(0)
    size = MINI_BATCH // MICRO_BATCHES
    rows = torch.arange(size)
<result>
    split_spec = {name: SplitPoint.BEGINNING for name in SPLIT_POINTS}
    torch.export.export = inlining(torch.export.export)  # which pipeline calls
<traced>    modules = [Stage(pipe, s) for s in mine]
    stages = [
        PipelineStage(
            module,
            s,
            len(SPLIT_POINTS) + 1,
            DEVICE,
            input_args=module.takes,
            output_args=module.gives,
            group=mesh.get_group("stages"),
        )
        for s, module in zip(mine, modules, strict=True)
    ]
    wanted = {root for module in modules for root in module.own.values()}
    roots = [keyword(node) for node in pipe.split_gm.graph.nodes if node.op == "placeholder"]

    def inputs(args, kwargs):
        leaves = dict(zip(roots, tree_leaves((args, kwargs)), strict=True))
        return {name: leaves[name] for name in wanted}

    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    optimizer = make_optimizer(parameters) if parameters else None
    of_replica = torch.cat(torch.arange(MINI_BATCH).split(size)[replica::REPLICAS])

    # Targets can be nests of tensors, and the schedule splits one tensor: it is given their rows.
    def loss_of(output, rows):
<lost>
    schedule = <made>
<loaded>    losses, seconds = [], []
    for step in range(asked.steps):
        dist.barrier()
        begun = time.perf_counter()
        args, kwargs, target = batch(step)
        found = []
        schedule.step(
            **part(inputs(args, kwargs), of_replica),
            target=of_replica if last else None,
            losses=found if last else None,
            return_outputs=False,
        )
<summed>        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
        if last:
            mean = torch.stack([value.detach().double() for value in found]).mean()
            if REPLICAS > 1:
                dist.all_reduce(mean, group=mesh.get_group("replicas"))
                mean /= REPLICAS
            losses.append(float(mean))
            if not replica:
                print(f"step {step}: loss {losses[-1]:.6f}, {seconds[-1]:.4f} s", flush=True)
    if last and not replica:
        print(f"{statistics.median(seconds):.4f} s per mini-batch, in the median")
        if asked.losses:
            with open(asked.losses, "w") as file:
                json.dump({"losses": losses, "seconds": seconds}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
