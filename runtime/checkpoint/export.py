"""Export of a run's whole model to one file, for plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ...planner.plan import read_plan
from ...profiles.errors import FileError
from ...profiles.files import MADE_BY, Kind, check_output
from ..records.run_dir import load_tied_names, load_weights, save_tensors
from .checkpoint import Saved
from .start import source


class Exported(NamedTuple):
    """What was written.

    Attributes:
        source: where it was taken from.
        tied: names that aren't in the file, and the ones that stand for them there.
    """

    source: Path
    tied: dict[str, str]


def export(run: str | Path, output: str | Path, *, at: int | None = None) -> Exported:
    """Write all parameters and buffers, under the model's own names, to a safetensors file.

    They are those of the run's newest checkpoint; without checkpoints, its final weights. What has
    several names is written once, under the first, and the metadata have the others, as
    `safetensors.torch.save_model` has it.

    Args:
        run: a run directory, or one of its checkpoints.
        at: another checkpoint, by the mini-batches done.

    Raises FileError: there are none, or a file is broken or can't be written.
    """
    run, output = Path(run), Path(output)
    check_output(output, Kind.MODEL)
    saved = source(run, at, "--at {at}")
    if saved is None:
        weights, names = load_weights(run), load_tied_names(run)
    else:
        weights, names = _whole_model(saved), saved.tied_names()
    tied = {
        name: first
        for name, first in names.items()
        if name in weights and first in weights and first not in names
    }
    once = {name: tensor for name, tensor in weights.items() if name not in tied}
    # Libraries that read weights of several frameworks ask for the format.
    save_tensors(output, once, {**tied, "format": "pt", **dict([MADE_BY])})
    return Exported(run / "weights" if saved is None else saved.path, tied)


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
