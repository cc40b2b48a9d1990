"""Sound files and command lines, and broken ones made from them."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import click
import msgspec
from click.testing import CliRunner
from fuzz.commands import Call, command_named, inside
from fuzz.mutations import broken_arguments, broken_bytes, broken_json, broken_lines
from helpers.output.commands import commands_below
from helpers.paths import PLANNERS, TESTS
from helpers.plans import with_times
from helpers.published_files import GRAPH, PIPER, PLACEMENT
from timeprest.planner.cluster.cluster import Cluster, read_cluster
from timeprest.planner.plan import Plan
from timeprest.planner.search.solve import solve
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.profile import Profile
from timeprest.tests.benchmarks.published.command import published

TASK = f"{TESTS / 'tasks/mlp_task.py'}:MLPTask"

CLUSTER = """\
[[devices]]
name = "big"
memory = "16GiB"
machine = "left"

[[devices]]
name = "small"
count = 3
memory = "8GiB"
speed = 0.5
machine = "node"
per_machine = 2

[network]
bandwidth = "12GB/s"
latency = "10us"
overlap = true

[between_machines]
bandwidth = "1.5GB/s"
latency = "15us"
half_duplex = false

[all_reduce]
processes = 2
bandwidth = "1.2GB/s"
latency = "440us"
"""

SPEC = """\
name = "a device"
memory_bytes = "32GB"
memory_bandwidth_bytes_per_s = "900GB/s"
peak_flops_per_s = { float32 = 15.7e12, float16 = 125e12, tf32 = 156e12 }
launch_s = "5us"
source = "a data sheet"
matmul = "float32"
compute_efficiency = 0.5
"""

_WORDS = [
    "machine",
    "count",
    "per_machine",
    "devices",
    "network",
    "node9",
    "node2",
    "nan",
    "inf",
    "cores",
]

SETTINGS: dict[str, Any] = {
    "format": "timeprest-run/1",
    "task": TASK,
    "epochs": 2,
    "steps": 3,
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
    "warmup": 0,
    "seed": 0,
    "threads": 1,
    "timeout_s": 60.0,
    "decay": "exponential",
    "decay_rate": 1.0,
}

FILES = ("profile", "plan", "cluster", "settings", "run", "spec", "graph", "placement", "piper")
FILES += ("onnx",)
"""Kinds of files; the first three are the project's own formats."""

COMMANDS = ("tp-profile", "solve", "show", "check", "simulate", "published", "tp-run")

_SOLVE = ("--devices", "3", "--time-limit", "0.5", "-q", "-o", "out.plan.json")


@functools.cache
def sound_profile() -> Profile:
    """Of a small task, with times that don't depend on the machine."""
    from timeprest.profiles.measuring.measure import measure
    from timeprest.profiles.target import resolve

    return with_times(measure(resolve(TASK), batch_size=8, micro_batch_sizes=[2, 4, 8], seconds=0))


@functools.cache
def sound_plan(variant: str) -> Plan:
    """Of two or three stages, on the cluster of the file above."""
    return solve(sound_profile(), _sound_cluster(), variant, time_limit_s=60)


def _sound_cluster() -> Cluster:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(CLUSTER)
        file.flush()
        return read_cluster(file.name)


@functools.cache
def sound_onnx() -> bytes:
    """A linear layer and an activation."""
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    weight = numpy_helper.from_array(np.ones((3, 4), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 4])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    found: bytes = model.SerializeToString()
    return found


@functools.cache
def sound_run() -> dict[str, bytes]:
    """Files of a run that was stopped in the middle: by their paths."""
    with tempfile.TemporaryDirectory() as folder, inside(Path(folder)):
        fill(Path("box"))
        words = ["box/plan.json", "--inline", "--steps", "4", "--checkpoint-every", "2", "-q"]
        words += ["--task", TASK, "--run-dir", "stopped"]
        done = CliRunner().invoke(command_named("tp-run"), words)
        assert done.exit_code == 0, done.output
        # As if the second checkpoint had never been reached.
        ended = Path("stopped/checkpoints/00000004")
        files = [f for f in Path("stopped").rglob("*") if f.is_file() and ended not in f.parents]
        return {str(file): file.read_bytes() for file in sorted(files)}


def fill(box: Path) -> None:
    """Sound files for the other arguments: profile.json, plan.json, cluster.toml, graph.txt."""
    box.mkdir(parents=True)
    (box / "profile.json").write_bytes(msgspec.json.encode(sound_profile()))
    (box / "plan.json").write_bytes(msgspec.json.encode(sound_plan("timeprest")))
    (box / "cluster.toml").write_text(CLUSTER)
    (box / "graph.txt").write_text(GRAPH)
    (box / "run").mkdir()
    (box / "run" / "plan.json").write_bytes(msgspec.json.encode(sound_plan("timeprest")))
    (box / "run" / "settings.json").write_text(json.dumps(SETTINGS))


def broken_file(kind: str, rng: Random, box: Path) -> tuple[str, list[Call]]:
    """Write a broken file of the kind into the box; its name, and the commands to try it with."""
    name, data, calls = _MAKERS[kind](rng)
    if kind == "run":
        for other, content in sound_run().items():
            (box / other).parent.mkdir(parents=True, exist_ok=True)
            (box / other).write_bytes(content)
    path = box / name
    path.write_bytes(data)
    # A checkpoint's own list may be what is broken, and another file what it tells of.
    return "stopped/" if kind == "run" else path.name, calls


def _plain(value: msgspec.Struct) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def _profile(rng: Random) -> tuple[str, bytes, list[Call]]:
    name = "broken.json"
    if rng.random() < 0.2:
        calls = [Call("tp-plan", ("check", "plan.json", "--profile", name))]
    else:
        variant = rng.choice(list(VARIANTS))
        words = ("solve", name, *_SOLVE, "--variant", variant)
        out = "out.plan.json"
        calls = [
            Call("tp-plan", words, (out, Plan)),
            Call("tp-plan", ("show", out)),
            Call("tp-plan", ("simulate", out)),
        ]
    return name, broken_json(rng, _plain(sound_profile())), calls


def _plan(rng: Random) -> tuple[str, bytes, list[Call]]:
    name = "broken.json"
    out = "out.plan.json"
    words: Sequence[str] = rng.choice(
        [
            ("show", name),
            ("show", name, "--json"),
            ("check", name, "--profile", "profile.json", "-o", out),
            ("simulate", name),
            ("simulate", name, "--json", "--mini-batches", "3"),
            (name, "--inline", "--steps", "2", "--task", TASK, "--run-dir", "fresh"),
            (name, "--inline", "--steps", "2", "--run-dir", "fresh", "--check"),
        ]
    )
    command = "tp-run" if words[0] == name else "tp-plan"
    writes = (out, Plan) if out in words else None
    plan = _plain(sound_plan(rng.choice(("timeprest", "pipedream", "gpipe", "v-timeprest"))))
    return name, broken_json(rng, plan), [Call(command, tuple(words), writes)]


def _cluster(rng: Random) -> tuple[str, bytes, list[Call]]:
    out = "out.plan.json"
    words = ("solve", "profile.json", "--cluster", "broken.toml", "--time-limit", "0.5", "-q")
    variant = ("--variant", rng.choice(("timeprest", "pipedream", "gpipe")))
    calls = [Call("tp-plan", (*words, *variant, "-o", out), (out, Plan))]
    return "broken.toml", broken_lines(rng, CLUSTER, _WORDS), calls


def _settings(rng: Random) -> tuple[str, bytes, list[Call]]:
    (name, data) = ("plan.json", _plain(sound_plan("timeprest"))) if rng.random() < 0.3 else (
        "settings.json", SETTINGS)  # fmt: skip
    return f"run/{name}", broken_json(rng, data), [Call("read-run", ("run",))]


def _run(rng: Random) -> tuple[str, bytes, list[Call]]:
    """What a run is resumed, exported or reported from: its files, its logs among them."""
    files = sound_run()
    read = [n for n in files if "checkpoints" in n or n.endswith((".json", ".jsonl"))]
    name = rng.choice(read)
    if name.endswith(".json"):
        data = broken_json(rng, json.loads(files[name]))
    else:
        data = broken_bytes(rng, files[name])
    words = rng.choice(
        [
            ("--resume", "--run-dir", "stopped", "--inline", "-q"),
            ("export", "stopped", "-o", "all"),
            ("report", "stopped", "-o", "page"),
        ]
    )
    return name, data, [Call("tp-run", words)]


def _spec(rng: Random) -> tuple[str, bytes, list[Call]]:
    words = (TASK, "--device", "meta", "--spec", "broken.toml", "--batch-size", "4", "-q")
    calls = [Call("tp-profile", (*words, "-o", "out.json"), ("out.json", Profile))]
    return "broken.toml", broken_lines(rng, SPEC, _WORDS), calls


def _foreign(name: str, data: bytes, rng: Random) -> tuple[str, bytes, list[Call]]:
    if rng.random() < 0.4:
        words = ("--plugin", str(PLANNERS), "published", name)
        words += ("--time-limit", "0.5", "--devices", "2")
        return name, data, [Call("tp-plan", words)]
    out, words = "out.json", ("--batch-size", "4", "--plugin", str(PLANNERS))
    return (
        name,
        data,
        [
            Call("tp-profile", (name, *words, "-o", out), (out, Profile)),
            Call("tp-plan", ("solve", out, *_SOLVE), ("out.plan.json", Plan)),
        ],
    )


def _onnx(rng: Random) -> tuple[str, bytes, list[Call]]:
    words = ("broken.onnx", "--device", "meta", "--spec", "v100-sxm2-32gb", "--batch-size", "4")
    calls = [Call("tp-profile", (*words, "-q", "-o", "out.json"), ("out.json", Profile))]
    return "broken.onnx", broken_bytes(rng, sound_onnx()), calls


_MAKERS = {
    "profile": _profile,
    "plan": _plan,
    "cluster": _cluster,
    "settings": _settings,
    "run": _run,
    "spec": _spec,
    "graph": lambda rng: _foreign("broken.txt", broken_lines(rng, GRAPH, _WORDS), rng),
    "placement": lambda rng: _foreign("broken.json", broken_json(rng, PLACEMENT), rng),
    "piper": lambda rng: _foreign("broken.json", broken_json(rng, PIPER), rng),
    "onnx": _onnx,
}


def broken_line(which: str, rng: Random) -> list[Call]:
    """A broken command line for sound files."""
    out = "out.plan.json"
    sound = {
        "tp-profile": (TASK, "--device", "meta", "--spec", "v100-sxm2-32gb", "-o", "out.json"),
        "solve": ("profile.json", "--devices", "3", "-o", out),
        "show": ("plan.json",),
        "check": ("plan.json", "--profile", "profile.json", "-o", out),
        "simulate": ("plan.json",),
        "published": ("graph.txt", "--devices", "2"),
        "tp-run": ("plan.json", "--steps", "2", "--run-dir", "fresh"),
    }[which]
    # First, where no broken word before them can swallow them: a process for each stage would
    # take too long, as would an unlimited search.
    first = {
        "tp-profile": ("--batch-size", "8", "--seconds", "0"),
        "solve": ("--time-limit", "0.5"),
        "published": ("--time-limit", "0.5"),
        "tp-run": ("--inline",),
    }.get(which, ())
    tool = which if which.startswith("tp-") else "tp-plan"
    command = command_named(tool)
    if which == "published":
        command, which = published, f"--plugin {PLANNERS} published"
    elif isinstance(command, click.Group):
        command = commands_below(command)[which]
    words = [*first, *_short(broken_arguments(rng, sound, _options(command)))]
    return [Call(tool, tuple(words if tool == which else (*which.split(), *words)))]


def _options(command: click.Command) -> list[tuple[str, bool]]:
    # --links measures this machine with processes of its own.
    return [
        (name, not p.is_flag)
        for p in command.params
        if isinstance(p, click.Option) and p.name != "links"
        for name in (*p.opts, *p.secondary_opts)
    ]


def _short(words: Sequence[str]) -> list[str]:
    """Long times that a search or measurement is allowed become short ones."""
    found = list(words)
    for k in range(1, len(found)):
        if found[k - 1] in ("--time-limit", "--seconds"):
            try:
                found[k] = "0.5" if float(found[k]) > 1 else found[k]
            except ValueError:
                continue
    return found
