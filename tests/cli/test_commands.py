"""The commands as users run them: what they print, what they write, and how they fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import timeprest
from click.testing import CliRunner
from helpers.plans import plan_by_hand, with_times
from timeprest.cli.plan import main as plan_main
from timeprest.cli.profile import main as profile_main
from timeprest.cli.run import main as run_main
from timeprest.profiles.files import read_file
from timeprest.profiles.profile import Profile

BIN = Path(sys.executable).parent
MAIN = {"tp-profile": profile_main, "tp-plan": plan_main, "tp-run": run_main}


def call(*arguments, cwd, code=0, timeout=170):
    """Run a command; returns the finished process."""
    command = [str(BIN / arguments[0]), *map(str, arguments[1:])]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done


def call_here(*arguments, cwd, code=0):
    """The same in this process, which has torch already."""
    name, *rest = map(str, arguments)
    before = os.getcwd()
    os.chdir(cwd)
    try:
        done = CliRunner().invoke(MAIN[name], rest, prog_name=name)
    finally:
        os.chdir(before)
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done


def one_line(stderr):
    """The only line on stderr."""
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    return lines[0]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder with a profile and a plan of the digits task, made by the commands."""
    folder = tmp_path_factory.mktemp("digits")
    done = call(
        *("tp-profile", "digits", "--batch-size", 64, "--micro-batch-sizes", "16,64"),
        *("--seconds", 0.5, "-o", "profile.json"),
        cwd=folder,
    )
    assert "conv1" in done.stdout
    assert "whole model" in done.stdout
    done = call(
        *("tp-plan", "solve", "profile.json", "-o", "plan.json", "--stages", 2),
        *("--micro-batches", 4, "--memory", "32MiB"),
        cwd=folder,
    )
    # What can be proven hangs on the times that were measured.
    assert "proven optimal" in done.stdout or "lower bound" in done.stdout
    return folder


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_the_demo_learns_the_digits(digits):
    """Two processes, timeprest, N = 4: at least 97 % after 12 epochs, and the whole summary.

    With two mini-batches in flight, whatever limit the measured times made best: how stale weights
    get would hang on them.
    """
    plan = json.loads((digits / "plan.json").read_text())
    plan["stages"][0]["in_flight"] = 2
    (digits / "two.json").write_text(json.dumps(plan))
    call_here(
        *("tp-plan", "check", "two.json", "--profile", "profile.json", "-o", "two.json"), cwd=digits
    )
    done = call_here("tp-run", "two.json", "--epochs", 12, "--run-dir", "run", cwd=digits)
    summary = json.loads((digits / "run" / "summary.json").read_text())
    assert summary["variant"] == "timeprest"
    assert summary["mode"] == "processes"
    assert summary["micro_batches"] == 4
    assert summary["epochs"][-1]["test"]["accuracy"] >= 0.97
    assert len(summary["stages"]) == 2
    assert summary["measured_period_s"] > 0
    assert all(stage["peak"]["weights_bytes"] > 0 for stage in summary["stages"])
    for word in ("period measured", "predicted", "idle", "peak", "versions", "differences seen"):
        assert word in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert (digits / "run" / "weights" / "stage1.safetensors").exists()


@pytest.mark.choice(0)
@pytest.mark.slow
def test_the_demo_learns_in_the_plan_with_the_largest_difference(digits, tmp_path):
    """Which plan is best hangs on the times measured; that of the demo must learn in any."""
    profile = with_times(read_file(digits / "profile.json", Profile))
    plan = plan_by_hand(profile, "timeprest", 2, 4, [3, 1], mini_batch=64)
    assert max(stage.version_difference for stage in plan.predicted.stages) == 2
    found = timeprest.run(plan, tmp_path / "run", epochs=6, inline=True)
    assert found.epochs[-1].test["accuracy"] >= 0.9


def test_show_prints_stages_and_operations(digits):
    done = call("tp-plan", "show", "plan.json", "--operations", 6, cwd=digits)
    assert "0F0.0 0F0.1 0F0.2 0F0.3" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    as_json = json.loads(call("tp-plan", "show", "plan.json", "--json", cwd=digits).stdout)
    assert as_json == json.loads((digits / "plan.json").read_text())
    for name in ("method", "objective_s", "bound_s", "optimal"):
        assert name in as_json["solver"]
    assert as_json["predicted"]["stages"][0]["memory_bytes"] > 0
    assert call("tp-plan", "show", "plan.json", "-q", cwd=digits).stdout == ""


@pytest.mark.slow
def test_inline_run_as_json(digits):
    done = call_here(
        *("tp-run", "plan.json", "--inline", "--steps", 3, "--json", "--run-dir", "inline"),
        *("--optimizer", "adam", "--lr", "0.001"),
        cwd=digits,
    )
    summary = json.loads(done.stdout)
    assert summary["mode"] == "inline"
    assert summary["mini_batches"] == 3
    assert summary["measured_period_s"] is None


@pytest.mark.slow
def test_an_edited_plan_is_checked_and_runs(digits):
    """Move a layer by hand, let check make the plan whole, run it."""
    plan = json.loads((digits / "plan.json").read_text())
    first, second = plan["stages"]
    second["nodes"].insert(0, first["nodes"].pop())
    (digits / "edited.json").write_text(json.dumps(plan))
    run = ("tp-run", "edited.json", "--inline", "--steps", 1, "--run-dir", "edited")
    assert "tp-plan check" in one_line(call_here(*run, cwd=digits, code=2).stderr)
    done = call_here(
        *("tp-plan", "check", "edited.json", "--profile", "profile.json", "-o", "edited.json"),
        cwd=digits,
    )
    assert "changed: edges" in done.stdout
    call_here(*run, cwd=digits)


UNTRACEABLE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
    def forward(self, x):
        if x.sum() > 0:
            return self.layer(x)
        return x
"""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("tp-plan solve none.json", "none.json: no such file"),
        ("tp-plan show none.json", "none.json: no such file"),
        ("tp-run none.json", "none.json: no such file"),
        ("tp-plan show broken.json", "broken.json: not valid JSON"),
        ("tp-run broken.json", "broken.json: not valid JSON"),
        ("tp-plan solve plan.json", "plan.json: not a profile file"),
        ("tp-run profile.json", "profile.json: not a plan file"),
        ("tp-plan solve profile.json --variant zigzag", "unknown system 'zigzag'"),
        ("tp-plan solve profile.json --memory 1MB", "lacks"),
        ("tp-plan solve profile.json --memory lots", "memory: can't read 'lots'"),
        ("tp-plan solve profile.json --bandwidth 0GB/s", "bandwidth: must be at least a byte"),
        ("tp-plan solve profile.json --stages many", "--stages 'many'"),
        ("tp-plan solve profile.json --cluster none.toml", "none.toml: no such file"),
        ("tp-plan solve profile.json -o /proc/none/plan.json", "can't be written"),
        ("tp-profile digits -o /dev/null/profile.json", "/dev/null isn't a folder"),
        ("tp-profile digits -o .", "is a folder; give the name of a file"),
        ("tp-profile nothing", "nothing: no such target"),
        ("tp-profile costs.csv", "costs.csv: no such file"),
        ("tp-profile no.such.module:net", "No module named"),
        ("tp-profile net.py:Missing --input 3", "there is no 'Missing'"),
        ("tp-profile net.py:Net", "--input"),
        ("tp-profile net.py:Net --input 3", "net.py:10"),
        ("tp-run plan.json --task text", "another model"),
        ("tp-run plan.json --epochs 1 --steps 2", "give one of them"),
        ("tp-run plan.json --optimizer sgd", "--lr"),
        ("tp-run plan.json --lr 0.1", "--optimizer"),
        ("tp-run plan.json --nesterov --optimizer sgd --lr 0.1", "--momentum above 0"),
        ("tp-run plan.json --betas 2,3 --optimizer adam --lr 0.1", "like 0.9,0.999"),
        ("tp-run plan.json --warmup 3", "--lr-schedule"),
        ("tp-run plan.json --ragged error", "--ragged drop"),
        ("tp-run plan.json --task net.py:Net", "training needs data, a loss and an optimizer too"),
        ("tp-profile digits --device meta", "--spec NAME, or --spec FILE"),
        ("tp-profile digits --device meta --spec none", "no device 'none': give one of a10"),
        ("tp-profile digits --spec a10", "--spec: goes with --device meta"),
        ("tp-profile digits --granularity conv9", "no module's name matches 'conv9'"),
        ("tp-profile digits --front-end sequential", "is not an nn.Sequential"),
        ("tp-profile digits --links", "takes no TARGET"),
        ("tp-profile digits --processes 4", "--processes: goes with --links"),
        ("tp-profile --links --batch-size 8", "--batch-size: is for a model"),
        ("tp-profile chain.csv --batch-size 8 --threads 2", "--threads: leave it out; chain"),
        ("tp-profile vgg16:depth=9", "depth"),
        ("tp-profile hf:nothing", "gpt2, llama, resnet, t5|gpt2"),
        ("tp-profile none.onnx", "none.onnx: no such file"),
        ("tp-profile broken.onnx", "broken.onnx"),
        (
            "tp-profile broken.graph.txt --batch-size 8",
            "no importer reads such a file",
        ),
        ("tp-profile broken.json", "broken.json"),
        ("tp-profile profile.json", "profile.json"),
        ("tp-profile net.py:Net --input =3", "--input '=3'"),
    ],
)
def test_bad_input_is_one_line_and_code_2(command, message, digits, monkeypatch, capfd):
    """Called in this process, as the entry points do it: torch is imported once for all."""
    (digits / "broken.json").write_text("{")
    (digits / "net.py").write_text(UNTRACEABLE)
    (digits / "broken.onnx").write_bytes(b"no model")
    (digits / "broken.graph.txt").write_text("node1 -- Linear -- costs nothing")
    before = {path.name for path in digits.iterdir()}
    monkeypatch.chdir(digits)
    name, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    main = import_module(f"timeprest.cli.{name.removeprefix('tp-')}").main
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    printed = capfd.readouterr()
    line = one_line(printed.err)
    assert line.startswith(f"{name}: ")
    assert any(part in line for part in message.split("|")), line
    assert printed.out == ""
    # Nothing half-written is left behind.
    after = {path.name for path in digits.iterdir()}
    assert after - before <= {"__pycache__"}


def test_too_little_memory_names_the_stage_and_the_bytes(digits):
    done = call_here("tp-plan", "solve", "profile.json", "--memory", "1MB", cwd=digits, code=2)
    assert re.search(r"lacks \d+ bytes .* on stage \d", one_line(done.stderr))


@pytest.mark.slow
def test_an_untraceable_model_ends_in_one_line_naming_its_line(digits):
    (digits / "net.py").write_text(UNTRACEABLE)
    done = call_here("tp-profile", "net.py:Net", "--input", "3", cwd=digits, code=2)
    assert "net.py:10: `if x.sum() > 0:`" in one_line(done.stderr)


@pytest.mark.slow
def test_a_model_is_reckoned_on_a_device_that_isnt_there(digits):
    done = call_here(
        *("tp-profile", "hf:bert,num_hidden_layers=2", "--device", "meta", "--spec", "h100-80gb"),
        *("-o", "meta.json", "--batch-size", 8, "--micro-batch-sizes", 8),
        *("--granularity", "bert.encoder.layer.*"),
        cwd=digits,
    )
    assert "not by torch.fx symbolic tracing:" in done.stdout
    assert "assumed: Nothing was run" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    found = json.loads((digits / "meta.json").read_text())
    assert found["device"] == "meta:h100-80gb"
    assert "bert.encoder.layer.1" in {layer["name"] for layer in found["layers"]}


def test_plan_starts_without_torch(digits):
    code = (
        "import sys; from timeprest.cli.plan import main; "
        "main(['show', 'plan.json'], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=digits, check=True, capture_output=True)
