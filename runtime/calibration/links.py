"""Measuring the links between local processes: message times and all-reduce times."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ...planner.cluster.link_fit import LinkPoint
from ...profiles.errors import RunError, UserError
from ...profiles.files import write_bytes
from ..processes.launcher import Workers, run_workers
from ..records.run_dir import RunDir

MESSAGE_BYTES = tuple(4096 * 4**k for k in range(8))
"""4 KiB to 64 MiB by powers of 4."""

CAP_S = 0.6
"""Time for one message size, for all pairs together; and again for its all-reduce."""

TIMEOUT_S = 10.0
"""Longest wait for another process, once all have met."""

MAX_PROCESSES = 64
"""Each one loads torch; more of them on one machine would measure its memory."""

Progress = Callable[[str, int, int], None]
"""Is told what is at hand, and how much of how much is done."""


class LinkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How links are measured; workers read it from their folder."""

    device: str
    message_bytes: Annotated[tuple[int, ...], Meta(min_length=2)]
    cap_s: Annotated[float, Meta(gt=0)] = CAP_S
    precision: Annotated[float, Meta(gt=0)] = 0.02
    """Relative standard error of a median that is good enough."""
    timeout_s: Annotated[float, Meta(gt=0)] = TIMEOUT_S


class LinkTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was measured.

    Attributes:
        pairs: for processes (0, 1), (1, 2), …: half a round trip for each message size.
        all_reduce: a sum over all processes, for the same sizes.
    """

    processes: int
    device: str
    backend: str
    pairs: tuple[tuple[LinkPoint, ...], ...]
    all_reduce: tuple[LinkPoint, ...]


class LinkDir(RunDir):
    """A measurement's temporary folder: settings, progress and the result; errors and logs."""

    @property
    def settings(self) -> Path:
        """What the workers are to do."""
        return self.path / "settings.json"

    @property
    def progress(self) -> Path:
        """Lines of JSON: [what, done, of]."""
        return self.path / "progress.jsonl"

    @property
    def times(self) -> Path:
        """The result."""
        return self.path / "times.json"


def backend_of(device: str) -> str:
    """torch.distributed's transport for a device's tensors."""
    return {"cpu": "gloo", "cuda": "nccl"}[device]


def check_request(processes: int, device: str) -> None:
    """Raise UserError where such a measurement can't be made on this machine."""
    if not 2 <= processes <= MAX_PROCESSES:
        raise UserError(f"processes: give 2 to {MAX_PROCESSES}, not {processes}")
    if device not in ("cpu", "cuda"):
        raise UserError(f"device: links are measured on cpu or cuda, not {device!r}")
    if device == "cuda":
        import torch

        found = torch.cuda.device_count()
        if found < processes:
            raise UserError(
                f"device cuda: {processes} processes need a GPU each, and there are {found}; "
                "ask for fewer processes, or measure cpu"
            )


def measure_links(
    processes: int = 2,
    device: str = "cpu",
    *,
    message_bytes: Sequence[int] = MESSAGE_BYTES,
    cap_s: float = CAP_S,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> LinkTimes:
    """Time messages between neighbouring local processes, and all-reduce over all of them.

    Args:
        processes: how many are started; process k talks to process k + 1.
        device: "cpu" (gloo over the loopback device, as tp-run's stages do) or "cuda" (NCCL, a
            GPU for each process).
        message_bytes: message sizes.
        cap_s: time for one size, for all pairs together, and again for its all-reduce.
        timeout_s: longest wait for another process, once all have met.
        progress: called from a thread while the workers measure.

    Raises:
        UserError: too few processes or GPUs.
        RunError: a worker died, got stuck, or failed; all have ended.
        KeyboardInterrupt: stopped by the user; all workers have ended.
    """
    check_request(processes, device)
    settings = LinkSettings(
        device=device, message_bytes=tuple(message_bytes), cap_s=cap_s, timeout_s=timeout_s
    )
    with tempfile.TemporaryDirectory(prefix="timeprest-links-") as folder:
        where = LinkDir(folder)
        write_bytes(where.settings, msgspec.json.encode(settings))
        workers = Workers(
            module=f"{__package__}.link_worker",
            where=where,
            labels=tuple(f"process {rank}" for rank in range(processes)),
            logs_kept=False,
        )
        run_workers(workers, _Progress(where.progress, progress))
        try:
            return msgspec.json.decode(where.times.read_bytes(), type=LinkTimes)
        except (OSError, msgspec.DecodeError) as error:
            raise RunError(f"the workers ended without a result: {error}") from None


class _Progress:
    """Passes on the last line of a progress file that grows."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self.path = path
        self.progress = progress
        self._position = 0

    def __call__(self) -> None:
        if self.progress is None:
            return
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                new = file.read()
        except OSError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._position += len(whole)
        if whole:
            what, done, of = msgspec.json.decode(whole.splitlines()[-1], type=tuple[str, int, int])
            self.progress(what, done, of)
