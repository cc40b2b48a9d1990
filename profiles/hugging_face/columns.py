"""Columns of tokens in the rows of a Hugging Face model's data: their lengths and numbers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import TargetError
from ..tasks.parts import transforms

BESIDE = {
    "attention_mask": "input_ids",
    "token_type_ids": "input_ids",
    "decoder_attention_mask": "decoder_input_ids",
}
"""Columns beside ids, of whose tokens they say something; filled up with 0."""


def longest(target: str, splits: Mapping[Any, Any], name: str) -> int:
    """Length of the longest value of a column of tokens in all splits.

    Raises TargetError where a row's isn't a list.
    """
    return max((_longest(target, rows, name) for rows in splits.values()), default=1)


def _longest(target: str, rows: Any, name: str) -> int:
    table: Any = getattr(rows, "data", None)
    # What a transform makes of the table's columns shows in rows alone.
    if hasattr(table, "column") and not transforms(rows):
        column = table.column(name)
        # Of lists of lists the length says nothing: looked at row by row, they are refused.
        if not getattr(getattr(column.type, "value_type", None), "num_fields", 1):
            compute = importlib.import_module("pyarrow.compute")
            lengths = compute.list_value_length(column)
            # The table still has the rows that a filter or a selection has left out.
            indices = getattr(rows, "_indices", None)
            if indices is not None:
                lengths = lengths.take(indices.column(0))
            return int(compute.max(lengths).as_py() or 0)
    found = 0
    for k in range(len(rows)):
        value = rows[k][name]
        # A list's first item tells of all, and all of them would take long.
        nested = isinstance(value, list) and bool(value) and np.ndim(value[0]) > 0
        if nested or not (isinstance(value, list) or np.ndim(value) == 1):
            whole_numbers(f"{target}: row {k}", name, value)
        found = max(found, len(value))
    return found


def whole_numbers(where: str, name: str, value: Any) -> Tensor:
    """A copy of a column of tokens, ``[tokens]``, that may be a tensor, an array or a list.

    Args:
        where: which row, for the error.

    Raises TargetError where it has another number of dimensions, or numbers that aren't whole.
    """
    try:
        found = np.asarray(value.detach().cpu().numpy() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError):  # lists of unlike lengths, types that NumPy hasn't
        found = np.empty((), object)
    if found.ndim > 1 or (found.ndim == 0 and found.dtype != object):
        raise TargetError(
            f"{where}: its {name} have shape {list(found.shape)}; they must be a list of whole "
            "numbers, one for each token: make rows by a tokenizer without return_tensors=, or "
            "take [0] of what it gave"
        )
    whole = np.full(found.shape, found.dtype.kind in "iub")
    if found.dtype.kind == "f":
        whole = np.isfinite(found) & (found == np.rint(found))
    if not whole.all():
        some = " ".join(str(found[~whole].flat[0]).split())[:20] if found.ndim else ""
        raise TargetError(
            f"{where}: its {name} must be a list of whole numbers, one for each token"
            + (f", and one of these is {some}" if some else "")
        )
    return torch.from_numpy(found.astype(np.int64))


def text_in(where: str, row: Mapping[str, Any], names: Sequence[str]) -> str:
    """The text in the first of these columns that a row has.

    Args:
        where: which row, for the error.

    Raises TargetError where that holds no text: one that is missing has no tokens.
    """
    name = next(name for name in names if name in row)
    text = row[name]
    if not isinstance(text, str):
        raise TargetError(f"{where}: its {name} is {str(text)[:40]!r}, which is no text")
    return text


def check_length(where: str, name: str, value: Sequence[Any] | Tensor, ids: str, of: Any) -> None:
    """Check that a row has as many of a column as it has ids. Raises TargetError."""
    if len(value) != len(of):
        raise TargetError(
            f"{where}: there are {len(value)} {name} and {len(of)} {ids}; there must be one for "
            "each token"
        )
