"""Export of a run's whole model: for plain PyTorch, Hugging Face, or torch's own checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch import Tensor

from ...planner.plan import read_plan
from ...profiles import plugins
from ...profiles.errors import FileError, UserError
from ...profiles.files import MADE_BY, Kind, check_output, new_folder, write_bytes
from ...profiles.tasks.hooks import in_one_line
from ..records.run_dir import load_tied_names, load_weights, save_tensors, why_not_whole
from .initial_weights import source

SHARD_BYTES = 5 * 10**9
"""Of files with an index, where the user doesn't say: as Hugging Face has it."""


class Exported(NamedTuple):
    """What was written.

    Attributes:
        source: where it was taken from.
        tied: names that aren't in the file, and the ones that stand for them there.
        files: with tensors in them.
    """

    source: Path
    tied: dict[str, str]
    files: int


class Weights(NamedTuple):
    """All parameters and buffers of a model.

    Attributes:
        named: by the model's own names, tied ones under each.
        tied: names that stand for what another name does, and that one.
        run: whose they are.
    """

    named: dict[str, Tensor]
    tied: dict[str, str]
    run: Path

    @property
    def once(self) -> dict[str, Tensor]:
        """What has several names under the first of them alone."""
        return {name: tensor for name, tensor in self.named.items() if name not in self.tied}


def export(
    run: str | Path,
    output: str | Path,
    *,
    to: str = "safetensors",
    at: int | None = None,
    shard_bytes: int | None = None,
) -> Exported:
    """Write all parameters and buffers under the model's own names.

    They are those of the run's newest checkpoint; without checkpoints, its final weights. What has
    several names is written once, under the first, and the metadata have the others, as
    `safetensors.torch.save_model` has it; in torch's format it is under every name, as in a
    state_dict.

    Args:
        run: a run directory, or one of its checkpoints.
        output: a new or empty folder; for safetensors without `shard_bytes` a file.
        to: "safetensors"; "hf", what `from_pretrained` loads; "dcp", what
            `torch.distributed.checkpoint.load` does.
        at: another checkpoint, by the mini-batches done.
        shard_bytes: of each file at most, but for a tensor that is larger; of "dcp" about so many.

    Raises:
        FileError: there are none, or a file is broken or can't be written.
        UserError: no such format; "hf" of a model that isn't Hugging Face's, or the library isn't
            there.
        TargetError: "hf": the task can't be imported, or its model built.
    """
    run, output = Path(run), Path(output)
    if to == "safetensors" and shard_bytes is None:
        check_output(output, Kind.MODEL)
        found, taken_from = _read(run, at)
        save_tensors(output, found.once, _metadata(found.tied))
        return Exported(taken_from, found.tied, 1)
    with new_folder(output) as folder:
        found, taken_from = _read(run, at)
        if to not in _WRITERS and to not in (known := plugins.names("formats")):
            raise UserError(f"to {to!r}: give one of {', '.join((*_WRITERS, *known))}")
        given = found, folder, shard_bytes
        own = _WRITERS.get(to)
        files: int = own(*given) if own else plugins.make("formats", to, *given, gives=int)
    return Exported(taken_from, {} if to == "dcp" else found.tied, files)


def _read(run: Path, at: int | None) -> tuple[Weights, Path]:
    """The weights, and where they were found. Raises FileError."""
    saved = source(run, at, "--at {at}")
    if saved is None:
        if lacking := why_not_whole(run):
            raise FileError(f"{lacking}: put there what other hosts have in theirs")
        weights, names, run_dir = load_weights(run), load_tied_names(run), run
    else:
        # RUN/checkpoints/00000120
        run_dir = saved.path.absolute().parent.parent
        for s in range(len(read_plan(run_dir / "plan.json").stages)):
            name = f"weights/stage{s}.safetensors"
            if name not in saved.info.files:
                raise FileError(
                    f"{saved.path / name}: isn't in this checkpoint: export where all stages' "
                    "files are; stages on other machines have written theirs there"
                )
        weights, names = saved.weights(), saved.tied_names()
    tied = {
        name: first
        for name, first in names.items()
        if name in weights and first in weights and first not in names
    }
    return Weights(weights, tied, run_dir), run / "weights" if saved is None else saved.path


def _metadata(tied: Mapping[str, str]) -> dict[str, str]:
    # Libraries that read weights of several frameworks ask for the format.
    return {**tied, "format": "pt", **dict([MADE_BY])}


# Several safetensors files ------------------------------------------------------------------------


def shards(named: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    """Tensors file by file, in their sequence, each of `most` bytes or of one larger tensor."""
    found: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in named.items():
        if found[-1] and filled + tensor.nbytes > most:
            found.append({})
            filled = 0
        found[-1][name] = tensor
        filled += tensor.nbytes
    return found


def _write_safetensors(weights: Weights, folder: Path, most: int | None) -> int:
    """Files and their index are called as Hugging Face's libraries do."""
    once = weights.once
    found = shards(once, most or SHARD_BYTES)
    metadata, names = _metadata(weights.tied), ["model.safetensors"]
    if len(found) > 1:
        names = [f"model-{k + 1:05d}-of-{len(found):05d}.safetensors" for k in range(len(found))]
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in once.values()), **weights.tied},
            "weight_map": {
                name: file for file, part in zip(names, found, strict=True) for name in part
            },
        }
        text = msgspec.json.format(msgspec.json.encode(index), indent=1)
        write_bytes(folder / "model.safetensors.index.json", text + b"\n")
    for file, part in zip(names, found, strict=True):
        save_tensors(folder / file, part, metadata)
    return len(found)


# torch.distributed.checkpoint ---------------------------------------------------------------------


def _write_dcp(weights: Weights, folder: Path, most: int | None) -> int:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    named = {name: tensor.contiguous() for name, tensor in weights.named.items()}
    total = sum(tensor.nbytes for tensor in named.values())
    files = min(math.ceil(total / most), len(named)) if most else 1
    with in_one_line("torch.distributed.checkpoint", FileError), warnings.catch_warnings():
        # Of there being one process alone.
        warnings.simplefilter("ignore")
        # It has a file for each of its threads.
        writer = FileSystemWriter(folder, thread_count=max(files, 1))
        save(named, storage_writer=writer, no_dist=True)
    return len(list(folder.glob("*.distcp")))


Writer = Callable[[Weights, Path, int | None], int]
"""Writes weights into a folder, in files of so many bytes at most, and says how many files."""

_WRITERS: dict[str, Writer] = {"safetensors": _write_safetensors, "dcp": _write_dcp}
