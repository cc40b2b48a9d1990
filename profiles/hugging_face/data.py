"""Samples for Hugging Face models: of a text file, of a `datasets` folder, in memory.

Every sample is a dict of inputs by the names of the forward's arguments, and its labels.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, Subset

from ..errors import FileError, TargetError, one_line
from ..files import check_regular, file_errors
from ..tasks.hooks import in_one_line
from ..tasks.parts import ALL, INPUTS, TARGET, Parts, transforms
from ..tasks.task import Split
from ..zoo.synthetic import FIRST_SEED, IGNORED, mask_tokens
from .classes import LABELS, check_class_numbers, labels_of_text
from .columns import BESIDE, check_length, longest, text_in, whole_numbers
from .images import PixelScale, pixel_scale, pixels
from .model import (
    BYTES,
    FIRST_ID,
    TEXT_LENGTH,
    Request,
    class_of,
    library,
    quiet,
    skeleton,
    tokenizer_of,
)


def free_id(padding_id: int) -> int:
    """Of the ids below FIRST_ID, the one that isn't padding."""
    return 1 if padding_id == 0 else 0


# Rows: what a file, a folder or memory holds, each a mapping from columns to values -------------

SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "test": ("test", "validation", "valid", "dev", "eval"),
}
"""What the parts of a folder are called, in order of preference."""
TESTED = 10
"""Where nothing is said to be for testing, the last of so many parts is."""


class Columns:
    """Columns of equal lengths as rows."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._columns = dict(columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self._columns.items()}

    @property
    def column_names(self) -> list[str]:
        """All of them."""
        return list(self._columns)

    def select_columns(self, names: Sequence[str]) -> Columns:
        """Rows with these alone."""
        return Columns({name: self._columns[name] for name in names})

    def select(self, part: range) -> Columns:
        """Some of the rows, one behind the other."""
        return Columns({name: c[part.start : part.stop] for name, c in self._columns.items()})


def splits_of(target: str, found: Any) -> dict[Split, Any]:
    """Rows for training and for testing.

    Args:
        found: rows, or rows by the names of their splits.

    Raises TargetError where there are none for training.
    """
    for rows in found.values() if isinstance(found, Mapping) else [found]:
        if not hasattr(rows, "__len__") or hasattr(rows, "iterrows"):
            raise TargetError(
                f"{target}: its data, of class {type(rows).__name__}, has no rows by number: give "
                "a list, or a Dataset (of a DataFrame, Dataset.from_pandas makes one)"
            )
    by_name = isinstance(found, Mapping) and bool(set(found) & set(SPLITS["train"]))
    if isinstance(found, Mapping) and not by_name:
        if any(set(found) & set(names) for names in SPLITS.values()):
            raise TargetError(f"{target}: its data has splits {', '.join(found)}, but no 'train'")
        found = Columns(found)
    if by_name:
        chosen: dict[Split, Any] = {}
        for split, names in SPLITS.items():
            rows = next((found[name] for name in names if name in found), None)
            if rows is not None:
                chosen[split] = Columns(rows) if isinstance(rows, Mapping) else rows
        if len(chosen) == len(SPLITS):
            return chosen
        found = chosen["train"]
    count = len(found)
    border = count - max(1, count // TESTED) if count > 1 else count
    # Selected by the library `datasets`, rows still say what it knows of them: lengths, names.
    own = isinstance(found, Columns) or isinstance(getattr(found, "features", None), Mapping)
    select = found.select if own else partial(Subset, found)
    return {"train": select(range(border)), "test": select(range(border, count))}


def rows_of(request: Request) -> dict[Split, Any]:
    """Rows of the file or folder that the target names. Raises TargetError."""
    path = Path(request.data).expanduser()
    if path.is_dir():
        return _folder_rows(request, path)
    try:
        check_regular(path)
        with file_errors(path, "read"):
            text = path.read_text(encoding="utf-8", errors="replace")
    except FileError as error:
        raise TargetError(f"{request.target}: data={error}") from None
    return _text_rows(request, text)


def _folder_rows(request: Request, path: Path) -> dict[Split, Any]:
    datasets = library(request.target, "datasets")
    what = f"{request.target}: data={request.data}: isn't what a dataset's save_to_disk writes"
    with in_one_line(what, text=one_line):
        found = datasets.load_from_disk(str(path))
    numbers = (
        {name: part.with_format("numpy") for name, part in found.items()}
        if isinstance(found, Mapping)
        else found.with_format("numpy")
    )
    return splits_of(request.target, numbers)


def _text_rows(request: Request, text: str) -> dict[Split, Any]:
    """Of running text, rows of equal lengths; for pairs, a row for each line, with a tab within."""
    if request.family in ("causal", "masked"):
        length = text_length(request)
        ids = Coder(request).ids(text)
        count = len(ids) // length
        if count < 2:
            raise TargetError(
                f"{request.target}: data={request.data}: has {len(ids)} tokens, which is less than "
                f"2 samples of {length}: give more text, or a smaller length="
            )
        return splits_of(
            request.target, {"input_ids": ids[: count * length].reshape(count, length)}
        )
    names = {"seq2seq": ("source", "target"), "classification": ("text", "label")}
    if request.family not in names:
        raise TargetError(
            f"{request.target}: data={request.data}: text files are for causal, masked and "
            "sequence-to-sequence language models and for classification: give a datasets folder"
        )
    first, second = names[request.family]
    lines = [line.split("\t") for line in text.splitlines() if line.strip()]
    for k, line in enumerate(lines, 1):
        if len(line) != 2:
            raise TargetError(
                f"{request.target}: data={request.data}: its line {k} must be {first}, a tab and "
                f"{second}"
            )
    seconds: list[Any] = [line[1] for line in lines]
    if second == "label":
        seconds = labels_of_text(request, seconds)
    return splits_of(request.target, {first: [line[0] for line in lines], second: seconds})


def text_length(request: Request) -> int:
    """Tokens of a sample that is made from text."""
    return request.length or min(TEXT_LENGTH, request.positions or TEXT_LENGTH)


class Coder:
    """From text to token ids: by the folder's tokenizer, or a token for each byte."""

    def __init__(self, request: Request) -> None:
        self._request = request

    @cached_property
    def _tokenizer(self) -> Any:
        request = self._request
        if request.tokenizer:
            return (
                None
                if request.tokenizer == BYTES
                else tokenizer_of(request.target, request.tokenizer)
            )
        if request.folder:
            raise TargetError(
                f"{request.target}: there is no tokenizer in {request.folder}: give "
                f"tokenizer=FOLDER, or tokenizer={BYTES} for a token of each byte"
            )
        return None

    def ids(
        self, text: str, length: int | None = None, *, answer: bool = False
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Ids of a text: as one sample's of that length at most, or of running text.

        Args:
            answer: a decoder is to write it, maybe in another language.
        """
        if self._tokenizer is None:
            found = np.frombuffer(text.encode(), np.uint8).astype(np.int64) + FIRST_ID
            return found[:length]
        with quiet():
            found = self._tokenizer(
                **{"text_target" if answer else "text": text},
                add_special_tokens=length is not None,
                truncation=length is not None,
                max_length=length,
            )["input_ids"]
        return np.asarray(found, np.int64)

    @property
    def mask_id(self) -> int | None:
        """What stands for a hidden token; None: there is no such id."""
        if self._tokenizer is None:
            return free_id(self._request.special_id("pad_token_id"))
        return self._tokenizer.mask_token_id  # type: ignore[no-any-return]


# From rows to samples ---------------------------------------------------------------------------

IDS = ("input_ids", "decoder_input_ids")
_TEXTS = ("text", "source")
_NEEDED = {
    "causal": "input_ids or text",
    "masked": "input_ids or text",
    "seq2seq": "input_ids and labels, or source and target",
    "classification": "input_ids and labels, or text and label",
    "tokens": "input_ids and labels",
    "image": "pixel_values or image, and labels",
}
"""Which columns rows must have."""


@dataclass(frozen=True)
class Lengths:
    """Of all samples, in tokens: of what goes in, and of the labels of a sequence."""

    inputs: int
    labels: int


def lengths_of(request: Request, splits: Mapping[Split, Any]) -> Lengths:
    """What all samples of a model for tokens are filled up to, or cut: what is asked for, else the
    longest of them.

    Raises TargetError for rows that the model has too few positions for.
    """
    if request.length is not None:
        return Lengths(request.length, request.length)
    first = splits["train"][0] if len(splits["train"]) else {}
    inputs = labels = text_length(request)
    if "input_ids" in first:
        inputs = labels = longest(request.target, splits, "input_ids")
    if request.family == "seq2seq" and "labels" in first:
        labels = longest(request.target, splits, "labels")
    if request.positions is not None and max(inputs, labels) > request.positions:
        raise TargetError(
            f"{request.target}: the data's longest row has {max(inputs, labels)} tokens, and the "
            f"model {request.positions} positions (max_position_embeddings): cut rows with "
            "length=…"
        )
    return Lengths(inputs, labels)


class HuggingFaceSamples(Dataset[Any]):
    """Rows as samples of one length: ``({argument: tensor}, labels)``.

    Columns that the model's forward has no argument for are left out. Labels of causal models are
    shifted here, by one position, as these models do by themselves.
    """

    def __init__(self, request: Request, split: Split, rows: Any, lengths: Lengths) -> None:
        self._request = request
        self._rows = rows
        self._lengths = lengths
        self._seed = FIRST_SEED[split]
        self._coder = Coder(request)
        self._pad = request.special_id("pad_token_id")
        self._arguments = set(inspect.signature(class_of(request).forward).parameters)
        self._columns: set[str] = set()
        if len(rows):
            first = rows[0]
            self._check_columns(first)
            self._columns = set(first)
            if not transforms(rows):
                check_class_numbers(request, rows)
        self._parts = ALL

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor | None]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self._rows[index]
        made = self._made
        inputs: dict[str, Tensor] = {}
        if self._request.family == "image":
            inputs = {"pixel_values": self._pixels(index, row)} if INPUTS in made else {}
        elif INPUTS in made:
            inputs = self._inputs(index, row)
        labels = self._labels(index, row, inputs) if TARGET in made else None
        if INPUTS not in self._parts:
            return {}, labels
        if self._request.family == "seq2seq" and "decoder_input_ids" not in inputs:
            assert labels is not None
            inputs["decoder_input_ids"] = self._shift_right(labels)
        for name in IDS:
            if name in inputs:
                self._check_ids(index, name, inputs[name])
        return inputs, labels

    def only(self, parts: Parts) -> HuggingFaceSamples:
        """The same samples with inputs or labels alone, of the columns that these need: where one
        is made of the other, those of both."""
        found = copy.copy(self)
        found._parts = parts
        select = getattr(self._rows, "select_columns", None)
        columns = getattr(self._rows, "column_names", None)
        if select is not None and columns and not transforms(self._rows):
            made = found._made
            inputs = {*IDS, *BESIDE, "text", "source", "pixel_values", "image"}
            labels = {*LABELS, "target"}
            wanted = (inputs if INPUTS in made else set()) | (labels if TARGET in made else set())
            found._rows = select([name for name in columns if name in wanted])
        return found

    @cached_property
    def _labelled(self) -> bool:
        return bool(self._columns & set(LABELS))

    @property
    def _made(self) -> Parts:
        """What has to be made of a row for the parts that are wanted."""
        family, labelled = self._request.family, self._labelled
        hidden = family == "masked" and not labelled
        shifted = family == "seq2seq" and not {"decoder_input_ids", "input_ids"} <= self._columns
        of_inputs = hidden or (family == "causal" and not labelled)
        of_labels = hidden or shifted
        return self._parts | ({INPUTS} if of_inputs else set()) | ({TARGET} if of_labels else set())

    def _check_columns(self, row: Any) -> None:
        if not isinstance(row, Mapping):
            raise TargetError(
                f"{self._request.target}: a row of its data is a {type(row).__name__}; it must be "
                "a dict by the names of columns"
            )
        family, names = self._request.family, set(row)
        labelled = bool(names & set(LABELS))
        there = "input_ids" in names or bool(names & set(_TEXTS))
        if family == "image":
            there = bool(names & {"pixel_values", "image"})
        elif family == "tokens":
            there = "input_ids" in names
        elif family == "seq2seq":
            labelled = labelled or "target" in names
        if not there or not (labelled or family in ("causal", "masked")):
            raise TargetError(
                f"{self._request.target}: its data has columns {', '.join(sorted(names))}; for "
                f"{family} there must be {_NEEDED[family]}"
            )
        if lost := sorted(self._arguments & names - {*IDS, *BESIDE, *LABELS, "pixel_values"}):
            raise TargetError(
                f"{self._request.target}: its data has a column {lost[0]}, which the model's "
                "forward takes and isn't given here: leave it out, or write a task of your own"
            )

    # Tokens

    def _inputs(self, index: int, row: Mapping[str, Any]) -> dict[str, Tensor]:
        """What goes into the model, filled up."""
        where = f"{self._request.target}: row {index}"
        if "input_ids" in row:
            wanted = self._arguments.intersection((*IDS, *BESIDE))
            found = {name: whole_numbers(where, name, row[name]) for name in wanted if name in row}
            for name, of in BESIDE.items():
                if name in found and of in found:
                    check_length(where, name, found[name], of, found[of])
        else:
            ids = self._coder.ids(text_in(where, row, _TEXTS), self._lengths.inputs)
            found = {"input_ids": torch.from_numpy(ids.copy())}
        found.setdefault("attention_mask", torch.ones_like(found["input_ids"]))
        return {name: self._fill(name, value) for name, value in found.items()}

    def _fill(self, name: str, value: Tensor) -> Tensor:
        length = self._lengths.labels if name.startswith("decoder") else self._lengths.inputs
        return self._filled(value, length, self._filling(name))

    def _filling(self, name: str) -> int:
        return self._pad if name in IDS else 0

    def _filled(self, value: Tensor, length: int, filling: int) -> Tensor:
        return filled(value, length, filling)

    def _labels(self, index: int, row: Mapping[str, Any], inputs: dict[str, Tensor]) -> Tensor:
        """What the model is to give; a masked model's inputs are masked where there are none."""
        family = self._request.family
        if family in ("classification", "image"):
            return self._class(index, row)
        where = f"{self._request.target}: row {index}"
        given = next((row[name] for name in LABELS if name in row), None)
        if given is None and family == "seq2seq":
            text = text_in(where, row, ("target",))
            given = self._coder.ids(text, self._lengths.labels, answer=True)
        if given is not None:
            labels = whole_numbers(where, "labels", given)
            if family != "seq2seq" and "input_ids" in row:
                check_length(where, "labels", labels, "input_ids", row["input_ids"])
            length = self._lengths.labels if family == "seq2seq" else self._lengths.inputs
            labels = self._filled(labels, length, IGNORED)
            classes = family == "tokens"
            self._check_labels(index, labels, classes=classes)
        elif family == "causal":
            labels = inputs["input_ids"].where(inputs["attention_mask"].bool(), IGNORED)
        else:
            return self._mask(index, inputs)
        if family == "causal":
            labels = torch.cat([labels[1:], labels.new_tensor([IGNORED])])
        return labels

    def _mask(self, index: int, inputs: dict[str, Tensor]) -> Tensor:
        """Hide some tokens: the same of each sample in every epoch."""
        mask_id = self._coder.mask_id
        if mask_id is None:
            raise TargetError(
                f"{self._request.target}: its tokenizer has no mask token: give data with labels"
            )
        generator = torch.Generator().manual_seed(self._seed + index)
        ids = inputs["input_ids"].clone()
        labels = torch.full_like(ids, IGNORED)
        # Padding may stand on either side, and is nothing to learn.
        real = inputs["attention_mask"].nonzero().flatten()
        if len(real):
            ids[real], labels[real] = mask_tokens(generator, ids[real], len(real), mask_id)
        inputs["input_ids"] = ids
        return labels

    @cached_property
    def _shift_right(self) -> Callable[[Tensor], Tensor]:
        """What the decoder is given, of labels: each model says so itself."""
        model = skeleton(self._request)
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if shift is None:
            raise TargetError(
                f"{self._request.target}: this model doesn't say what its decoder is given: the "
                "data needs a column decoder_input_ids"
            )

        def shifted(labels: Tensor) -> Tensor:
            what = f"{self._request.target}: the decoder's input can't be made of labels"
            with in_one_line(what, text=one_line):
                found: Tensor = shift(labels[None])[0]
            return found

        return shifted

    def _check_ids(self, index: int, name: str, ids: Tensor) -> None:
        size = self._request.vocabulary
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            outside = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
            raise TargetError(
                f"{self._request.target}: row {index} has {outside} in {name}, and the model ids "
                f"from 0 to {size - 1} (vocab_size={size})"
            )

    def _check_labels(self, index: int, labels: Tensor, *, classes: bool) -> None:
        config = self._request.config
        size = config.num_labels if classes else self._request.vocabulary
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= size))]
        if wrong.numel():
            key = f"num_labels={size}" if classes else f"vocab_size={size}"
            raise TargetError(
                f"{self._request.target}: row {index} has {int(wrong[0])} among its labels, which "
                f"must be from 0 to {size - 1} ({key}), or {IGNORED} where there is none"
            )

    # Classes and images

    def _class(self, index: int, row: Mapping[str, Any]) -> Tensor:
        """A class, or what is to be told instead by the config's problem_type."""
        given = np.asarray(next(row[name] for name in LABELS if name in row))
        kind = self._request.problem
        if kind != "single_label_classification":
            return torch.from_numpy(given.astype(np.float32))
        if given.dtype.kind not in "iub" or given.ndim:
            raise TargetError(
                f"{self._request.target}: row {index}: its label must be the number of a class; "
                "for several, or a measure, say problem_type=multi_label_classification or "
                "regression"
            )
        label = torch.tensor(int(given))
        self._check_labels(index, label[None], classes=True)
        return label

    def _pixels(self, index: int, row: Mapping[str, Any]) -> Tensor:
        """Of an image ``[channels, size, size]``."""
        if "pixel_values" in row:
            found = _tensor(row["pixel_values"], np.float32)
        else:
            where = f"{self._request.target}: row {index}"
            found = pixels(where, row["image"], self._request.size, self._pixel_scale)
        if found.dim() != 3 or (
            "image_size" in self._request.config.to_dict()
            and found.shape[1:] != (self._request.size, self._request.size)
        ):
            raise TargetError(
                f"{self._request.target}: row {index}: its pixel_values have shape "
                f"{list(found.shape)}; they must be channels, {self._request.size}, "
                f"{self._request.size} (image_size={self._request.size})"
            )
        return found

    @cached_property
    def _pixel_scale(self) -> PixelScale:
        return pixel_scale(self._request)


def _tensor(value: Any, dtype: type[np.generic]) -> Tensor:
    """A copy, of what may be a tensor, an array or lists."""
    return torch.from_numpy(np.array(value.numpy() if isinstance(value, Tensor) else value, dtype))


def filled(value: Tensor, length: int, filling: int) -> Tensor:
    """Cut or filled up at the end."""
    return functional.pad(value[:length], (0, max(length - len(value), 0)), value=filling)
