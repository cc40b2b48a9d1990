"""The whole model of a run in one file, for plain PyTorch."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ..planner.plan import read_plan
from ..profiles.errors import FileError
from ..profiles.outputs import MADE_BY, Kind, check_output
from .checkpoint import Saved
from .run_dir import load_weights, save_tensors
from .starting import source


def export(run: str | Path, output: str | Path, *, at: int | None = None) -> Path:
    """Write all parameters and buffers, under the model's own names, to a safetensors file.

    They are those of the run's newest checkpoint; without checkpoints, its final weights.

    Args:
        run: a run directory, or one of its checkpoints.
        at: another checkpoint, by the mini-batches done.

    Returns where they were taken from.

    Raises FileError: there are none, or a file is broken or can't be written.
    """
    run, output = Path(run), Path(output)
    check_output(output, Kind.MODEL)
    saved = source(run, at, "--at {at}")
    weights = load_weights(run) if saved is None else _whole_model(saved)
    save_tensors(output, weights, dict([MADE_BY]))
    return run / "weights" if saved is None else saved.path


def _whole_model(saved: Saved) -> dict[str, Tensor]:
    # RUN/checkpoints/00000120
    plan = read_plan(saved.path.absolute().parent.parent / "plan.json")
    for s in range(len(plan.stages)):
        name = f"weights/stage{s}.safetensors"
        if name not in saved.info.files:
            raise FileError(
                f"{saved.path / name}: isn't in this checkpoint: export where all stages' files "
                "are; stages on other machines have written theirs there"
            )
    return saved.weights()
