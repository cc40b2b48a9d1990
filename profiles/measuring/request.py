"""What a profile is asked for: the options of ``tp-profile``, which are `timeprest.profile`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..errors import UserError
from ..files import MAX_COUNT, Count, Factor, Threads
from ..options import Option, Spelled, chosen, read_record
from ..profile import FRONT_ENDS, front_ends
from ..units import shown, texts, whole

MODEL = "Model"
MEASURED = "What is measured"
NUMBERS = "Numbers instead of a model"
DEVICE = "Device"
"""Headings of the options' help."""

OF_FILES = ("batch_size", "micro_batch_sizes", "edges")
"""Fields of what is read, and not measured."""


def _sizes(given: object, name: str) -> list[int]:
    """``"4,8,16"`` or [4, 8, 16] → [4, 8, 16]. Raises UserError."""
    if isinstance(given, str):
        parts = [part.strip() for part in given.split(",")]
        if not all(part.isdecimal() and len(part) <= 12 and int(part) for part in parts):
            raise UserError(f"{name} {given!r}: give whole numbers from 1, like 4,8,16")
        return [int(part) for part in parts]
    try:
        return [whole(size, name) for size in given]  # type: ignore[attr-defined]
    except TypeError:
        raise UserError(f"{name}: give a list of them, not {shown(given)}") from None


def _inputs(given: object, name: str) -> list[str]:
    return texts(given, name, "3x32x32:float32")


def _front_end(given: object, name: str) -> str:
    return chosen(given, name, front_ends())


def check_sizes(
    sizes: Sequence[int] | None, batch_size: int | None, name: str = "micro_batch_sizes"
) -> None:
    """Raise UserError for micro-batches larger than the mini-batch."""
    if sizes and batch_size and max(sizes) > batch_size:
        raise UserError(f"{name}: {max(sizes)} is more than the mini-batch of {batch_size}")


@dataclass(frozen=True)
class ProfileRequest:
    """What is measured and how.

    Attributes:
        target: a built-in task or model, ``file.py:name``, ``pkg.module:name``, an ONNX file, or
            a table of costs or a file that a plugin imports, with the batch sizes; or an object: a
            task, a model, a class or function that makes one.
    """

    target: object
    _: KW_ONLY
    granularity: Annotated[str, Option(MODEL, metavar="layer|op|PATTERN")] = "layer"
    """What makes a layer: a leaf module, an operation, or a module whose name matches (h.*, or
    several with commas)."""
    front_end: Annotated[
        str | None,
        Option(
            MODEL,
            usual="the first that can",
            values=tuple(FRONT_ENDS),
            plugins="front_ends",
            read=_front_end,
        ),
    ] = None
    """How to find the graph."""
    inputs: Annotated[
        str | Sequence[str],
        Option(MODEL, flags=("--input",), metavar="SHAPE:DTYPE", several=True, read=_inputs),
    ] = ()
    """What a model that isn't a task takes, one sample: 3x32x32:float32, 64:int64:1000 for integers
    below 1000, or by name mask=64:int64. Once for each input."""
    batch_size: Annotated[
        Count | None,
        Option(MEASURED, usual="its DataLoader's, or the largest of --micro-batch-sizes, or 64"),
    ] = None
    """Samples in a mini-batch."""
    micro_batch_sizes: Annotated[
        Sequence[int] | str | None,
        Option(
            MEASURED,
            usual="the mini-batch and its halves; on meta its quarters",
            metavar="LIST",
            read=_sizes,
        ),
    ] = None
    """Sizes to measure, like 4,8,16."""
    seconds: Annotated[Factor, Option(MEASURED)] = 15.0
    """Time to spend on timing at most; 3 to 5 rounds are made in any case."""
    relative_error: Annotated[float, Meta(gt=0, le=1), Option(MEASURED)] = 0.05
    """Stop when every layer with 1 % of the time is known so well."""
    batches: Annotated[Count | None, Option(MEASURED, usual="32, within 5 s", metavar="N")] = None
    """Mini-batches to look at where a collate_fn or a batch_sampler may make them of different
    shapes: the largest is measured."""
    together: Annotated[
        Annotated[int, Meta(ge=2, le=MAX_COUNT)] | None, Option(MEASURED, metavar="N")
    ] = None
    """Measure too what stages cost besides their layers, and how N processes slow each other down
    that compute at once on this machine, as stages do."""
    edges: Annotated[
        str | Path | None,
        Option(NUMBERS, usual="each layer feeds the next", metavar="FILE", names="file"),
    ] = None
    """With a table of costs as TARGET: a table (CSV) with the columns from, to and, if need be,
    bytes."""
    device: Annotated[Literal["cpu", "cuda", "meta"], Option(DEVICE)] = "cpu"
    """meta: run nothing, reckon with --spec."""
    spec: Annotated[str | None, Option(DEVICE, metavar="NAME|FILE", names="file")] = None
    """With --device meta: the device to reckon with, by its data sheet."""
    threads: Annotated[Threads, Option(DEVICE)] = 1
    """Torch's threads; each stage will run with as many."""
    autocast: Annotated[
        Literal["bfloat16", "float16"] | None,
        Option(
            DEVICE,
            values=("bf16", "bfloat16", "float16"),
            read=lambda dtype, name: "bfloat16" if dtype == "bf16" else dtype,
        ),
    ] = None
    """Run forwards under torch.autocast with this dtype."""

    def read(self, spelled: Spelled = str) -> dict[str, Any]:
        """What is asked, by field. Raises UserError for what can't be."""
        asked = read_record(self, spelled)
        check_sizes(asked["micro_batch_sizes"], asked["batch_size"], spelled("micro_batch_sizes"))
        if asked["together"] is not None and asked["device"] != "cpu":
            raise UserError(f"{spelled('together')}: is for {spelled('device')} cpu")
        return asked
