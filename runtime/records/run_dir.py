"""The run directory: what lies in it, and how it is read and written."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from ...planner.plan import Plan, read_plan, with_plugin_at_hand
from ...profiles.errors import FileError, TaskWarning
from ...profiles.files import (
    RUN_FILES,
    RUN_FOLDERS,
    RUN_OWN,
    check_regular,
    file_errors,
    holds_settings,
    read_file,
    read_json,
    write_bytes,
    write_file,
)
from ..prepare.workers import Replica, Worker
from ..settings import RunSettings
from .metrics import RunSummary, StageReport, decode

T = TypeVar("T")

_MEND = "put back what the run had there, or remove it"


class RunDir:
    """Paths in a run directory (docs/run_directory.md says what is in them).

    What a stage's replica 0 writes is called stage0, what the others write stage0.1, stage0.2, …
    Weights are written by replica 0 alone. The status of a worker is called as its first stage's
    files.

    Attributes:
        metrics: progress, line by line.
        checkpoints: those that it has.
        statuses: where it is what each worker is at (`status`).
        summary: the end of the run; it is there when the run has ended.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        self.statuses = self.path / "status"
        self.summary = self.path / "summary.json"

    def check_new(self) -> None:
        """Raise FileError when it holds a run already, or files that a run would write over."""
        with file_errors(self.path, "read"):
            found = [name for name in RUN_OWN if os.path.lexists(self.path / name)]
            foreign = [name for name in found if not self._may_stand(name)]
        if "plan.json" in found and holds_settings(self.path):
            raise FileError(f"{self.path}: holds a run already; give another --run-dir")
        if foreign:
            raise FileError(
                f"{self.path}: isn't a run directory, and a run would write over its own "
                f"{foreign[0]}; give another --run-dir"
            )

    def _may_stand(self, name: str) -> bool:
        """Whether a run may find this before it begins: what one left that had hardly begun."""
        path = self.path / name
        if name == "settings.json":
            return holds_settings(self.path)
        if name in ("lock", "lock.workers"):
            # One that `locks` writes, and no other's of that name.
            if not path.is_file():
                return False
            with path.open("rb") as file:
                text = file.read(401)
            # Of many workers, each has written a line.
            return not text or re.fullmatch(rb"\d+ on \S+ ?\S*", text.split(b"\n")[0]) is not None
        # The launcher of many hosts may have been told to write its logs there.
        return path.is_dir() and (name == "logs" or not any(path.iterdir()))

    def check_kinds(self) -> None:
        """Raise FileError for a pipe or device that a run which goes on would read or write
        without end, and for a file in a folder's place or the other way round."""
        for name in RUN_FILES:
            if os.path.lexists(self.path / name):
                check_regular(self.path / name, _MEND)
        for name in RUN_FOLDERS:
            folder = self.path / name
            if os.path.lexists(folder) and not folder.is_dir():
                raise FileError(f"{folder}: isn't a folder; {_MEND}")
            for below, _, files in os.walk(folder):
                for file in files:
                    check_regular(Path(below, file), _MEND)

    def join(self, plan: Plan, settings: RunSettings) -> None:
        """Make what isn't there of it: another host's worker may have. Raises FileError."""
        with file_errors(self.path, "read"):
            if (self.path / "plan.json").exists():
                return
        write_file(self.path / "settings.json", settings)
        write_file(self.path / "plan.json", with_plugin_at_hand(plan))

    def make(self) -> None:
        """Make an empty directory, if there is none. Raises FileError."""
        with file_errors(self.path, "made"):
            self.path.mkdir(parents=True, exist_ok=True)

    def reopen(self, settings: RunSettings) -> None:
        """Get the directory of a run that is resumed ready: it hasn't ended, and checkpoints after
        the one that it goes on from, whose losses are cut off too, aren't its own. Raises
        FileError."""
        write_file(self.path / "settings.json", settings)
        for place in self.checkpoints.later(settings):
            folder = self.checkpoints.folder(place)
            shutil.rmtree(folder, ignore_errors=True)
            if folder.exists():
                raise FileError(f"{folder}: can't be removed; remove it")
        final = self.weights(0).parent.glob("stage*.safetensors")
        for path in (self.summary, *self.statuses.glob("*.json"), *final):
            with file_errors(path, "removed"):
                path.unlink(missing_ok=True)

    def read(self) -> tuple[Plan, RunSettings]:
        """What is being run. Raises FileError."""
        settings = read_file(self.path / "settings.json", RunSettings)
        return read_plan(self.path / "plan.json"), settings

    def operations(self, replica: Replica) -> Path:
        """A replica's log of operations."""
        return self.path / "operations" / f"{replica.file}.jsonl"

    def recorded(self, replica: Replica) -> Path:
        """A replica's operations of a few mini-batches, where not all are logged."""
        return self.path / "recorded" / f"{replica.file}.jsonl"

    def stage_metrics(self, replica: Replica) -> Path:
        """A replica's epochs."""
        return self.path / "stages" / f"{replica.file}.jsonl"

    def gradients(self, stage: int) -> Path:
        """A stage's gradients, a file for each update."""
        return self.path / "gradients" / f"stage{stage}"

    def weights(self, stage: int) -> Path:
        """A stage's final parameters and buffers. The file's metadata has the names that stand for
        what another name does, and that one."""
        return self.path / "weights" / f"stage{stage}.safetensors"

    def status(self, worker: Worker) -> Path:
        """What a worker is at."""
        return self.statuses / f"{worker.file}.json"

    def write_report(self, replica: Replica, report: StageReport) -> None:
        """Write a replica's figures."""
        write_file(self._report(replica), report)

    def read_reports(self, replicas: Sequence[Replica]) -> list[StageReport]:
        """These replicas' figures. Raises FileError."""
        return [_read(self._report(replica), StageReport) for replica in replicas]

    def read_summary(self) -> RunSummary | None:
        """The end of the run; None before that. Raises FileError."""
        return _read(self.summary, RunSummary) if self.summary.exists() else None

    def write_summary(self, summary: RunSummary) -> None:
        """Write the end of the run."""
        write_file(self.summary, summary)

    def _report(self, replica: Replica) -> Path:
        return self.path / "reports" / f"{replica.file}.json"


def _read(path: Path, kind: type[T]) -> T:
    try:
        return decode(read_json(path, ""), kind)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: isn't valid, or isn't of this version: {error}") from None


class Checkpoints:
    """A run's checkpoints, each in a folder that is called by the mini-batches it comes after."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def folder(self, mini_batches: int) -> Path:
        """The checkpoint after so many mini-batches."""
        return self.path / f"{mini_batches:08d}"

    def places(self) -> list[int]:
        """The mini-batches that they come after, rising."""
        try:
            found = [place_named(path.name) for path in self.path.iterdir() if path.is_dir()]
        except OSError:
            return []
        return sorted(place for place in found if place is not None)

    def newest(self) -> Path | None:
        """The last one; None: there is none yet."""
        places = self.places()
        return self.folder(places[-1]) if places else None

    def later(self, settings: RunSettings) -> list[int]:
        """The places after the one that a run goes on from."""
        return [place for place in self.places() if place > (settings.resume_at or 0)]


def place_named(folder: str) -> int | None:
    """The mini-batches that a checkpoint comes after, by its folder's name; None: it has another,
    as a copy may."""
    return int(folder) if re.fullmatch("[0-9]{8,}", folder) else None


_KEPT = "kept-"


def keep_alone(folder: Path, why: str) -> None:
    """Have the run keep this one of its checkpoints, whatever comes later, and no other one for the
    same reason. Raises FileError."""
    mark = _KEPT + re.sub(r"\W", "_", why)
    with file_errors(folder, "written"):
        for other in folder.parent.iterdir():
            (other / mark).unlink(missing_ok=True)
        (folder / mark).touch()


def is_kept(folder: Path) -> bool:
    """Whether a checkpoint isn't to be removed for newer ones."""
    return any(folder.glob(f"{_KEPT}*"))


def save_tensors(
    path: Path, named: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write tensors to a safetensors file. Raises FileError."""
    write_bytes(path, tensor_bytes(named, metadata))


def tensor_bytes(named: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Tensors as a safetensors file has them, with its metadata."""
    from safetensors.torch import save

    # safetensors wants each memory once, laid out in order: tied tensors are written under every
    # name.
    seen: set[int] = set()
    separate = {}
    for name, tensor in named.items():
        # Files hold what is in memory, and that of a conjugate is another tensor's.
        tensor = tensor.resolve_conj().resolve_neg()
        key = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.cpu().contiguous()
        if key in seen:
            separate[name] = separate[name].clone()
        seen.add(key)
    # Without tensors an empty dict of metadata makes a header that is no JSON.
    return save(separate, metadata or None)


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Final weights of a run, of all stages together, under the model's own names. A warning names
    stages that aren't there: hosts may each have a directory, with their own.

    Raises FileError when the run has none, or a file is broken.
    """
    state: dict[str, Tensor] = {}
    if lacking := why_not_whole(path):
        warnings.warn(lacking, TaskWarning, stacklevel=2)
    for file in _weight_files(path):
        state.update(read_tensors(file))
    return state


def why_not_whole(path: str | Path) -> str | None:
    """Which final weights of a run aren't there; None: those of all stages are, or nobody knows how
    many there are."""
    plan = Path(path) / "plan.json"
    if not plan.exists():
        return None
    there, stages = {file.name for file in _weight_files(path)}, len(read_plan(plan).stages)
    missing = [s for s in range(stages) if f"stage{s}.safetensors" not in there]
    if not missing:
        return None
    return (
        f"{Path(path) / 'weights'}: has no weights of {len(missing)} of its {stages} stages, of "
        f"stage {missing[0]} first"
    )


def load_tied_names(path: str | Path) -> dict[str, str]:
    """Names of `load_weights` that stand for what another name does, and that one.

    Raises as `load_weights`.
    """
    found: dict[str, str] = {}
    for file in _weight_files(path):
        found.update(tensor_metadata(file))
    return found


def _weight_files(path: str | Path) -> list[Path]:
    files = sorted((Path(path) / "weights").glob("stage*.safetensors"))
    if Path(path).is_file():
        raise FileError(f"{path}: is a file; the directory of a run is needed")
    if not files:
        raise FileError(f"{path}: no weights in it; has the run ended?")
    return files


def tensor_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file. Raises FileError."""
    from safetensors import SafetensorError, safe_open

    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError, MemoryError) as error:
        raise _unread(path, error) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises FileError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_regular(path)
    try:
        return load_file(path)
    except (OSError, SafetensorError, MemoryError) as error:
        raise _unread(path, error) from None


def _unread(path: Path, error: Exception) -> FileError:
    """Why a safetensors file can't be read: it may be torch's own kind of file."""
    begin = b""
    with suppress(OSError), path.open("rb") as file:
        begin = file.read(4)
    # A zip archive, or a pickle as it was before torch 1.6.
    if begin not in (b"PK\3\4", b"\x80\2\x8a\n"):
        return FileError(f"{path}: can't be read: {error}")
    return FileError(
        f"{path}: was written by torch.save, and this takes safetensors: write it anew by "
        'safetensors.torch.save_file(torch.load("…"), "….safetensors"), with what a model\'s '
        "state_dict() has and nothing besides"
    )
