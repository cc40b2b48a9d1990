"""Classes by name in data for Hugging Face models, and the numbers that a model has for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from ..errors import TargetError
from .model import Request

LABELS = ("labels", "label")
"""What a column of labels may be called, in order of preference."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def _own_numbers(config: Any) -> dict[str, int]:
    """The model's number of each class, by its name."""
    found = {str(name): int(k) for name, k in (config.label2id or {}).items()}
    return found | {str(name): int(k) for k, name in (config.id2label or {}).items()}


def labels_of_text(request: Request, texts: Sequence[str]) -> list[Any]:
    """Labels for a classifier as a text file has them, as numbers: those that the model has for
    classes of these names; those that stand there; else, for a model whose classes have no names,
    by the order of the names. Of a regression, measures.

    Raises TargetError naming a line that can't be told.
    """
    said = f"{request.target}: data={request.data}: "
    if request.problem == "multi_label_classification":
        raise TargetError(
            f"{said}a line of a text file has one class, and the model tells of several "
            "(problem_type): give a datasets folder"
        )
    if request.problem == "regression":
        for k, text in enumerate(texts, 1):
            if not _NUMBER.fullmatch(text.strip()):
                raise TargetError(f"{said}its line {k} must be text, a tab and a number, a measure")
        return [float(text) for text in texts]
    own, given = _own_numbers(request.config), set(texts)
    for known in (own, {str(k): k for k in range(request.config.num_labels)}):
        if given <= set(known):
            return [known[text] for text in texts]
    if any(name != f"LABEL_{k}" for name, k in own.items()):
        k, text = next((k, text) for k, text in enumerate(texts, 1) if text not in own)
        raise TargetError(
            f"{said}its line {k} has the class {text!r}, and those of the model are "
            f"{shorten(', '.join(sorted(own, key=own.__getitem__)), 200, placeholder=' …')} "
            "(id2label in its config.json): name classes so, or give their numbers"
        )
    numbers = {name: k for k, name in enumerate(sorted(given))}
    return [numbers[text] for text in texts]


def check_class_numbers(request: Request, rows: Any) -> None:
    """Check rows of the library `datasets` that name their classes: where the names are the
    model's, the numbers must be, too. Raises TargetError."""
    features = getattr(rows, "features", None)
    if not isinstance(features, Mapping):
        return
    column = next((name for name in LABELS if name in features), "")
    feature = features.get(column)
    names = getattr(getattr(feature, "feature", feature), "names", None) or []
    own = _own_numbers(request.config)
    wrong = [(k, name) for k, name in enumerate(names) if own.get(name, k) != k]
    if wrong and set(names) <= set(own):
        k, name = wrong[0]
        raise TargetError(
            f"{request.target}: class {name!r} has number {k} in the data and {own[name]} in the "
            f"model (id2label): make rows by align_labels_with_mapping(label2id, {column!r})"
        )
