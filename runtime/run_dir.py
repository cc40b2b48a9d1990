"""The run directory: what lies in it, and how it is read and written."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from ..planner.plan import Plan, read_plan
from ..profiles.errors import FileError
from ..profiles.files import read_file, write_bytes, write_file
from .scores import RunSummary, StageReport
from .settings import RunSettings


class RunDir:
    """Paths in a run directory.

    plan.json, settings.json   what was run
    metrics.jsonl              progress: mini-batches and epochs
    stages/stage0.jsonl        each stage's epochs: times, versions, distances
    operations/stage0.jsonl    every operation, where asked for
    gradients/stage0/0.safetensors
                               what each update stepped with, where asked for
    weights/stage0.safetensors final weights, under the model's own names
    reports/stage0.json        each stage's own figures
    summary.json               the end of the run
    errors/stage0.json         why a stage failed
    logs/                      what the workers printed
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def create(self, plan: Plan, settings: RunSettings) -> None:
        """Make the directory. Raises FileError when it holds a run already, or can't be made."""
        if (self.path / "plan.json").exists():
            raise FileError(f"{self.path}: holds a run already; give another --run-dir")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"{self.path}: can't be made: {error.strerror}") from None
        write_file(self.path / "settings.json", settings)
        write_file(self.path / "plan.json", plan)

    def read(self) -> tuple[Plan, RunSettings]:
        """What is being run. Raises FileError."""
        settings = read_file(self.path / "settings.json", RunSettings)
        return read_plan(self.path / "plan.json"), settings

    @property
    def metrics(self) -> Path:
        """Progress, line by line."""
        return self.path / "metrics.jsonl"

    def operations(self, stage: int) -> Path:
        """A stage's log of operations."""
        return self.path / "operations" / f"stage{stage}.jsonl"

    def stage_metrics(self, stage: int) -> Path:
        """A stage's epochs."""
        return self.path / "stages" / f"stage{stage}.jsonl"

    def gradients(self, stage: int) -> Path:
        """A stage's gradients, a file for each update."""
        return self.path / "gradients" / f"stage{stage}"

    def weights(self, stage: int) -> Path:
        """A stage's final weights."""
        return self.path / "weights" / f"stage{stage}.safetensors"

    def error(self, stage: int) -> Path:
        """Why a stage failed."""
        return self.path / "errors" / f"stage{stage}.json"

    def save_weights(self, stage: int, state: dict[str, Tensor]) -> None:
        """Write a stage's parameters and buffers. Raises FileError."""
        save_tensors(self.weights(stage), state)

    def write_report(self, report: StageReport) -> None:
        """Write a stage's figures."""
        self._write_json(self.path / "reports" / f"stage{report.stage}.json", report)

    def read_reports(self, stages: int) -> list[StageReport]:
        """All stages' figures. Raises FileError."""
        found = []
        for s in range(stages):
            path = self.path / "reports" / f"stage{s}.json"
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=StageReport))
            except (OSError, msgspec.DecodeError) as error:
                raise FileError(f"{path}: can't be read: {error}") from None
        return found

    def write_summary(self, summary: RunSummary) -> None:
        """Write the end of the run."""
        self._write_json(self.path / "summary.json", summary)

    def write_error(self, stage: int, message: str, *, from_peer: bool, exit_code: int) -> None:
        """Note why a stage failed; the launcher reports the first cause."""
        content = {
            "stage": stage,
            "message": message,
            "from_peer": from_peer,
            "exit_code": exit_code,
            "time": time.time(),
        }
        self._write_json(self.error(stage), content)

    def read_errors(self, stages: int) -> list[dict[str, Any]]:
        """What the stages noted, causes before their consequences, then by time."""
        found = []
        for s in range(stages):
            try:
                found.append(json.loads(self.error(s).read_text(encoding="utf-8")))
            except (OSError, ValueError):
                continue
        return sorted(found, key=lambda e: (bool(e["from_peer"]), float(e["time"])))

    def _write_json(self, path: Path, value: Any) -> None:
        write_bytes(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def save_tensors(path: Path, named: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file. Raises FileError."""
    from safetensors.torch import save

    # safetensors wants each memory once: tied tensors are written under every name.
    seen: set[int] = set()
    separate = {}
    for name, tensor in named.items():
        key = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if key in seen else tensor.contiguous()
        seen.add(key)
    write_bytes(path, save(separate))


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Final weights of a run, of all stages together, under the model's own names.

    Raises FileError when the run has none, or a file is broken.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted((Path(path) / "weights").glob("stage*.safetensors"))
    if not files:
        raise FileError(f"{path}: no weights in it; has the run ended?")
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise FileError(f"{file}: can't be read: {error}") from None
    return state
