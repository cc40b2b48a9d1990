"""What a stage gets from the others of its worker: their own tensors, without a copy.

Whoever made such a tensor may need it as it is, for its backward or for another receiver, and a
piece may change its inputs in place. Which of them it does change shows in its first run: until
then all are copied, and only those after that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from ...profiles.autograd.boundary import storage_key
from ..weights.in_place import ChangedInPlace


class HandedOver:
    """The inputs of a stage's piece that are handed over, in training or in evaluation."""

    def __init__(self, makers: Mapping[str, Callable[[], Collection[str]]] | None = None) -> None:
        """
        Args:
            makers: by the input's name, what tells which of its outputs the stage that makes it
                keeps for its backward.
        """
        self._makers = makers or {}
        self._changed = ChangedInPlace[str](
            "{!r} is changed in place, and wasn't in the first run: another stage of this device "
            "may need it as it was; make the operation one that isn't in place, or plan with "
            "--stages-per-device 1"
        )

    def safe(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Values for a first run of the piece, with copies of what it may change."""
        if not self._makers:
            return values
        copied = {name for name in self._makers if name in self._changed}
        return {name: v.clone() if name in copied else v for name, v in values.items()}

    def watch(self, names: Iterable[str], arguments: Iterable[Any]) -> dict[str, Tensor]:
        """Before the piece gets these arguments. Returns those that are handed over."""
        pairs = zip(names, arguments, strict=True)
        watched = {n: v for n, v in pairs if n in self._makers and isinstance(v, Tensor)}
        self._changed.begin(watched.items())
        return watched

    def check(self) -> None:
        """The piece has run. Raises RunError where it has changed what it hadn't before."""
        self._changed.end()

    def kept_elsewhere(self, names: Iterable[str]) -> set[str]:
        """Of these inputs, those whose memory the stage that made them keeps anyway."""
        return {
            name
            for name in names
            if name in self._makers
            and name in self._makers[name]()
            and name not in (self._changed.known or ())
        }

    def storages_kept_elsewhere(self, watched: Mapping[str, Tensor]) -> set[int]:
        """Their memory, by key."""
        return {storage_key(watched[name]) for name in self.kept_elsewhere(watched)}
