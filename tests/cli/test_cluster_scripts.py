"""The scripts for clusters in docs/examples: that they run, and that what they start can be."""

from __future__ import annotations

import os
import subprocess

import pytest
from helpers.paths import ROOT
from timeprest.cli.run import main
from torch.distributed.run import get_args_parser

EXAMPLES = ROOT / "docs" / "examples"
PROGRAM = "#!/bin/bash\n"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Runs a script where srun and torchrun only say what they were asked; gives those words."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("srun", 'printf "%s\\0" "$MASTER_ADDR:$MASTER_PORT" "$@"\n'),
        ("torchrun", 'printf "%s\\0" "$@"\n'),
        ("scontrol", 'test "$*" = "show hostnames n[1-2]"; seq -f n%.0f 20000\n'),
    ):
        (programs / name).write_text(PROGRAM + text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    def run(words, **environment):
        done = subprocess.run(
            words,
            env={**os.environ, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\0")[:-1]

    return run


def options(words):
    """What tp-run reads in the words."""
    found = main.make_context("tp-run", list(words)).params
    return {name: found[name] for name in ("plan_path", "run_dir", "resume", "epochs")}


def begun(folder):
    (folder / "runs/first").mkdir(parents=True)
    (folder / "runs/first/plan.json").touch()


NEW = {"plan_path": "plan.json", "run_dir": "runs/first", "resume": False, "epochs": 20}
RESUMED = {"plan_path": None, "run_dir": "runs/first", "resume": True, "epochs": None}


def test_slurm(started, tmp_path):
    """A new run with the user's own options, and the same job requeued."""
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "61234"}
    command = [EXAMPLES / "slurm.sh", "plan.json", "runs/first", "--epochs", "20"]
    for wanted in (NEW, RESUMED):
        address, *words = started(command, **slurm)
        assert address == "n1:21234"
        program = words.index("tp-run")
        assert all(word.startswith("--") for word in words[:program])
        assert options(words[program + 1 :]) == wanted
        if wanted is NEW:
            begun(tmp_path)


def test_kubernetes(started, tmp_path):
    """Names and numbers in a JobSet fit each other, and its pods' script starts the workers."""
    yaml = pytest.importorskip("yaml", reason="needs a reader of YAML")
    jobset = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())
    assert jobset["kind"] == "JobSet"
    (job,) = jobset["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    assert pods["parallelism"] == pods["completions"]
    (container,) = pods["template"]["spec"]["containers"]
    volumes = {volume["name"] for volume in pods["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    for wanted in (NEW, RESUMED):
        words = started([*container["command"], *container["args"]], JOB_COMPLETION_INDEX="1")
        found = get_args_parser().parse_args(words)
        assert found.module
        assert found.training_script == "timeprest.cli.run"
        assert (int(found.nnodes), int(found.node_rank)) == (pods["parallelism"], 1)
        name = jobset["metadata"]["name"]
        assert found.master_addr == f"{name}-{job['name']}-0-0.{name}"
        assert options(found.training_script_args) == wanted
        if wanted is NEW:
            begun(tmp_path)
