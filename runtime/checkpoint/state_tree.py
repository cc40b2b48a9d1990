"""Nested state of optimizers and schedulers as JSON, its tensors apart.

JSON has no tuples, no keys that aren't strings and no infinities: those are written as objects of
one entry that says what they are, ``{"tuple": [...]}``; so are tensors, by the name that they have
in the file beside it. Numbers come back as they were, bit for bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...profiles.errors import TargetError


def pack(tree: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """What of `tree` JSON can hold; its tensors are added to `tensors`.

    Args:
        path: names the tree; tensors get names below it.

    Raises TargetError for what is neither a tensor nor plain data.
    """
    if isinstance(tree, Tensor):
        tensors[path] = tree.detach()
        return {"tensor": path}
    # Types alone: a subclass would come back as something else.
    if tree is None or type(tree) in (bool, int, str):
        return tree
    if type(tree) is float:
        return tree if math.isfinite(tree) else {"float": str(tree)}
    if type(tree) in (list, tuple):
        parts = [pack(part, tensors, f"{path}/{k}") for k, part in enumerate(tree)]
        return parts if type(tree) is list else {"tuple": parts}
    if isinstance(tree, Mapping):
        pairs = [
            [pack(key, tensors, f"{path}/key"), pack(value, tensors, f"{path}/{key}")]
            for key, value in tree.items()
        ]
        return {"counter" if isinstance(tree, Counter) else "dict": pairs}
    raise TargetError(
        f"a checkpoint can't hold {path}: it is a {type(tree).__name__}, and only tensors, "
        "numbers, texts, lists and dicts of them are written. Train without checkpoints "
        "(--checkpoint-every 0), or with another optimizer or scheduler"
    )


def unpack(found: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The reverse of `pack`. Raises KeyError or ValueError for what it can't have made."""
    if isinstance(found, list):
        return [unpack(part, tensors) for part in found]
    if not isinstance(found, dict):
        return found
    ((kind, content),) = found.items()
    return _KINDS[kind](content, tensors)


def _mapping(pairs: Any, tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {unpack(key, tensors): unpack(value, tensors) for key, value in pairs}


_KINDS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "tensor": lambda name, tensors: tensors[name],
    "float": lambda text, tensors: float(text),
    "tuple": lambda parts, tensors: tuple(unpack(part, tensors) for part in parts),
    "dict": _mapping,
    "counter": lambda pairs, tensors: Counter(_mapping(pairs, tensors)),
}
