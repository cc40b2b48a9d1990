"""Checkpoints: a run as it is when the pipeline has drained, from which it goes on bit for bit.

    checkpoints/00000120/          mini-batches done
        checkpoint.json            where in the run it is, and a checksum of every other file
        weights/stage0.safetensors parameters and buffers, under the model's own names
        state/stage0.safetensors   tensors of the optimizer, random numbers, replicas' buffers
        state/stage0.json          numbers of the optimizer and the scheduler

A checkpoint is written as a directory with another name, and renamed once all workers have written
their parts: one that has its name is whole. Where workers have file systems of their own, each
holds the parts of its own workers.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

from ...planner.plan import Plan
from ...profiles.errors import FileError, TimeprestError, UserError
from ...profiles.files import (
    TaggedFile,
    check_regular,
    file_errors,
    read_file,
    write_bytes,
    write_file,
)
from ...profiles.options import given
from ...profiles.tasks.optimizers import for_use
from ..communication.channel import PeerError
from ..prepare.data import Segment
from ..prepare.workers import Replica
from ..records.metrics import EpochSums
from ..records.run_dir import RunDir, is_kept, place_named, tensor_bytes, tensor_metadata
from ..settings import FREE, LATER, RunSettings
from ..stage.runner import StageRunner
from ..stage.stage import Stage
from .plain_attributes import changed, plain_attributes
from .worker_state import WorkerState, capture

if TYPE_CHECKING:
    from ..prepare.prepared import Prepared
    from ..records.growing_file import GrowingFile

FORMAT = "timeprest-checkpoint/1"
INFO = "checkpoint.json"
_SUMS = ".sums"
_OF_STAGE = r"state/stage\d+\.json"
"""Numbers of a stage's first replica; the others have the same."""

Agree = Callable[[bool], bool]
"""Whether all workers say yes; all of them call it together."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of a checkpoint."""

    bytes: int
    sha256: str


class Checkpoint(TaggedFile, frozen=True, kw_only=True, tag=FORMAT):
    """What a checkpoint is of, and what is in it."""

    mini_batches: int
    """Done in the run."""
    epoch: int
    """That it lies in, counted from 0."""
    epoch_mini_batches: int
    """Done in that epoch."""
    samples: int | msgspec.UnsetType = msgspec.UNSET
    """In the training data; older ones don't say."""
    variant: str
    plan: str
    """Checksum of the plan."""
    settings: str
    """Checksum of the settings that change what is trained."""
    files: dict[str, Part]
    """By their paths below the checkpoint."""
    checksum: str = ""
    """Of all this; older ones have none."""


def plan_checksum(plan: Plan) -> str:
    """Changes whenever the plan does; not with its plugin's content, which the user is told of."""
    return _checksum(msgspec.structs.replace(plan, plugin_checksum=msgspec.UNSET))


def settings_checksum(settings: RunSettings) -> str:
    """Changes whenever a setting does that what is trained depends on."""
    settings = msgspec.structs.replace(settings, **_free(type(settings)))
    # Older checkpoints knew nothing of some.
    return _checksum(settings, set(LATER) - {*given(settings, LATER)})


@cache
def _free(kind: type[RunSettings]) -> dict[str, Any]:
    """Defaults of the settings that change nothing."""
    return {f.name: f.default for f in msgspec.structs.fields(kind) if f.name in FREE}


def info_checksum(info: Checkpoint) -> str:
    """Of all that it says but the checksum itself."""
    return _checksum(info, {"checksum"})


def _checksum(value: msgspec.Struct, without: Collection[str] = ()) -> str:
    # As a file has it: a whole number that was given for a float has been made one.
    read = msgspec.json.decode(msgspec.json.encode(value), type=type(value))
    found = {k: v for k, v in msgspec.to_builtins(read).items() if k not in without}
    return hashlib.sha256(msgspec.json.encode(found)).hexdigest()


# Reading ------------------------------------------------------------------------------------


class Saved:
    """A checkpoint on disk. Everything read from it is held against its checksum.

    Attributes:
        info: what it is of.
    """

    def __init__(self, path: Path) -> None:
        """Raises FileError when it isn't there, isn't one, or is another than its folder's name
        says."""
        self.path = path
        self.info = read_file(path / INFO, Checkpoint)
        if self.info.checksum not in ("", info_checksum(self.info)):
            raise FileError(f"{path / INFO}: is broken: it doesn't match its checksum")
        named = place_named(path.absolute().name)
        if named not in (None, self.info.mini_batches):
            raise FileError(
                f"{path}: holds the checkpoint after {self.info.mini_batches} mini-batches, and "
                f"is named as the one after {named}: put back what was there, or remove it"
            )

    def read(self, name: str) -> bytes:
        """A file's content. Raises FileError when it is missing or broken."""
        path = self.path / name
        part = self.info.files.get(name)
        if part is None:
            raise FileError(f"{path}: isn't in this checkpoint; was it written on another machine?")
        check_regular(path, "a checkpoint is whole or of no use")
        with file_errors(path, "read"):
            size = path.stat().st_size
            if size != part.bytes:
                raise FileError(f"{path}: is broken: it has {size} bytes instead of {part.bytes}")
            content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != part.sha256:
            raise FileError(f"{path}: is broken: it doesn't match its checksum")
        return content

    def tensors(self, name: str) -> dict[str, Tensor]:
        """A file's tensors. Raises FileError."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return load(self.read(name))
        except SafetensorError as error:
            raise FileError(f"{self.path / name}: can't be read: {error}") from None

    def worker_state(self, worker: str) -> WorkerState:
        """A worker's numbers, by what its files are called. Raises FileError."""
        name = f"state/{worker}.json"
        try:
            return msgspec.json.decode(self.read(name), type=WorkerState)
        except msgspec.DecodeError as error:
            raise FileError(f"{self.path / name}: {error}") from None

    def weights(self) -> dict[str, Tensor]:
        """Those of all stages that it has, under the model's own names. Raises FileError."""
        found: dict[str, Tensor] = {}
        for name in self._files(r"weights/.*"):
            found.update(self.tensors(name))
        return found

    def tied_names(self) -> dict[str, str]:
        """Names of `weights` that stand for what another name does, and that one. Raises
        FileError."""
        found: dict[str, str] = {}
        for name in self._files(r"weights/.*"):
            found.update(tensor_metadata(self.path / name))
        return found

    def kept(self) -> dict[str, tuple[str, Any]]:
        """Per parameter, by the model's name for it, the optimizer's class and what it keeps; of
        one with a state_dict of its own, nothing.

        Raises FileError.
        """
        from .worker_state import unpack

        found: dict[str, tuple[str, Any]] = {}
        for name in self._files(_OF_STAGE):
            state = self.worker_state(Path(name).stem)
            tensors = self.tensors(f"{name[:-5]}.safetensors")
            if state.optimizer is not None and state.kept is not None:
                for parameter, kept in unpack(state.kept, tensors).items():
                    found[parameter] = (state.optimizer, kept)
        return found

    def optimizers(self) -> dict[str, bool]:
        """Classes of optimizers in it that have kept something, and whether it is in a state_dict
        of their own. Raises FileError."""
        found: dict[str, bool] = {}
        for name in self._files(_OF_STAGE):
            if (self.path / name).exists():
                state = self.worker_state(Path(name).stem)
                nothing: dict[str, Any] = {"dict": []}
                own, kept = state.own is not None, (state.kept or nothing)["dict"]
                if state.optimizer and (own or any(each != nothing for _, each in kept)):
                    found[state.optimizer] = own
        return found

    def _files(self, pattern: str) -> list[str]:
        return [name for name in self.info.files if re.fullmatch(pattern, name)]

    def verify(self) -> None:
        """Raises FileError that names the first file that is missing or broken."""
        for name in self.info.files:
            self.read(name)


def find_whole(where: RunDir, at: int | None, instead: Callable[[int], str]) -> Saved | None:
    """The run's newest checkpoint, or the one `at` so many mini-batches, whole; None: it has none.

    Args:
        instead: what the user types to name another checkpoint.

    Raises:
        FileError: it is broken; the message names the file, and the newest whole one before it.
        UserError: there is none at this place.
    """
    known = where.checkpoints.places()
    if not known:
        return None
    if at is not None and at not in known:
        places = ", ".join(map(str, known))
        raise UserError(
            f"{where.checkpoints.path}: has no checkpoint at {at}; they are at {places}"
        )
    place = known[-1] if at is None else at
    try:
        return _whole(where, place)
    except FileError as error:
        for older in reversed([k for k in known if k < place]):
            with suppress(FileError):
                _whole(where, older)
                break
        else:
            raise FileError(f"{error}. No other one before it is whole") from None
        raise FileError(f"{error}. The one before it is whole: {instead(older)}") from None


def _whole(where: RunDir, place: int) -> Saved:
    found = Saved(where.checkpoints.folder(place))
    found.verify()
    return found


# Writing ------------------------------------------------------------------------------------


def contents(
    runner: StageRunner,
    random: Tensor,
    sums: EpochSums,
    logs: dict[str, int],
    left_out: Sequence[str] = (),
) -> dict[str, bytes]:
    """A worker's files of a checkpoint by their paths in it. Takes and raises as `capture`."""
    state, tensors = capture(runner.stage, random, sums, logs, left_out)
    state = msgspec.structs.replace(
        state,
        not_finite=tuple(runner.gradients.not_finite.mini_batches),
        beyond_profile=tuple(runner.data.beyond_profile),
    )
    file = runner.replica.file
    found = {
        f"state/{file}.json": msgspec.json.encode(state),
        f"state/{file}.safetensors": tensor_bytes(tensors),
    }
    if runner.replica.leads:
        with for_use(runner.stage.updates.optimizer):
            model, s = runner.prepared.model, runner.number
            weights = tensor_bytes(model.state(s), model.tied_names(s))
        found[f"weights/{file}.safetensors"] = weights
    return found


class CheckpointWriter:
    """Writes the checkpoints of a run, in each of its processes."""

    def __init__(
        self,
        where: RunDir,
        prepared: Prepared,
        agree: Agree,
        logs: Mapping[int, Sequence[GrowingFile]],
    ) -> None:
        """`logs`: by the replicas' numbers, what those of this process write."""
        plan, settings = prepared.plan, prepared.settings
        self.where = where
        self.variant, self.samples = plan.variant, prepared.samples
        self.plan, self.settings = plan_checksum(plan), settings_checksum(settings)
        self.keep = settings.keep_checkpoints
        self.agree = agree
        self.logs = logs
        self._attributes: dict[str, Any] = {}
        # A run that was killed may have left some.
        for path in where.checkpoints.path.glob(".*"):
            shutil.rmtree(path, ignore_errors=True)

    def begin(self, stages: Sequence[Stage]) -> None:
        """Training is about to begin, or to go on, with these of this process."""
        self._attributes = plain_attributes(stages)

    def write(
        self,
        segment: Segment,
        workers: Sequence[tuple[StageRunner, Tensor, EpochSums]],
    ) -> None:
        """Write the checkpoint at the end of a segment, together with all other processes.

        Args:
            workers: of this process, each with the state of its random numbers and its sums.

        Raises:
            FileError: it can't be written; those before it are as they were.
            TargetError: the user's optimizer keeps what can't be written.
            PeerError: another worker couldn't write its part.
        """
        target = self.where.checkpoints.folder(segment.end)
        partial = target.with_name(f".{target.name}.partial")
        first = any(runner.replica.rank == 0 for runner, _, _ in workers)
        try:
            self._together(lambda: self._write_parts(partial, workers))
            # On a file system that workers share, one of them ends it for all.
            self._together(lambda: self._end(partial, target, segment) if first else None)
            self._together(
                lambda: self._end(partial, target, segment) if partial.exists() else None
            )
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _together(self, act: Callable[[], None]) -> None:
        """Do something that all other processes do too, and find out whether all could."""
        problem: TimeprestError | None = None
        try:
            act()
        except TimeprestError as error:
            problem = error
        if self.agree(problem is None):
            return
        raise problem or PeerError("another worker couldn't write its part of a checkpoint")

    def _write_parts(
        self, partial: Path, workers: Sequence[tuple[StageRunner, Tensor, EpochSums]]
    ) -> None:
        left_out = changed(self._attributes, [runner.stage for runner, _, _ in workers])
        for runner, random, sums in workers:
            replica = runner.replica
            found = contents(runner, random, sums, self._sizes(replica), left_out)
            parts = {}
            for name, content in found.items():
                write_bytes(partial / name, content)
                digest = hashlib.sha256(content).hexdigest()
                parts[name] = Part(bytes=len(content), sha256=digest)
            write_bytes(partial / _SUMS / replica.file, msgspec.json.encode(parts))

    def _sizes(self, replica: Replica) -> dict[str, int]:
        found = {}
        for log in self.logs.get(replica.number, ()):
            log.flush()
            found[str(log.path.relative_to(self.where.path))] = log.size()
        return found

    def _end(self, partial: Path, target: Path, segment: Segment) -> None:
        """All parts are there: give the checkpoint its name, and remove the oldest ones."""
        with file_errors(target, "written"):
            mine = partial / f"{_SUMS}-read"
            try:
                os.rename(partial / _SUMS, mine)
            except FileNotFoundError:
                return  # Another worker is at it.
            files: dict[str, Part] = {}
            for path in sorted(mine.iterdir()):
                files.update(msgspec.json.decode(path.read_bytes(), type=dict[str, Part]))
            shutil.rmtree(mine)
            info = Checkpoint(
                mini_batches=segment.end,
                epoch=segment.epoch,
                epoch_mini_batches=segment.offset + segment.mini_batches,
                samples=self.samples,
                variant=self.variant,
                plan=self.plan,
                settings=self.settings,
                files=dict(sorted(files.items())),
            )
            checksum = info_checksum(info)
            write_file(partial / INFO, msgspec.structs.replace(info, checksum=checksum))
            if target.exists():
                # A broken one that the run was resumed before.
                old = target.with_name(f".{target.name}.old")
                os.rename(target, old)
                shutil.rmtree(old, ignore_errors=True)
            os.rename(partial, target)
        for place in self.where.checkpoints.places()[: -self.keep]:
            if not is_kept(self.where.checkpoints.folder(place)):
                shutil.rmtree(self.where.checkpoints.folder(place), ignore_errors=True)
