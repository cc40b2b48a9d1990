"""What a stage gets from the others of its worker: their own tensors, without a copy.

Whoever made such a tensor may need it as it is, for its backward or for another receiver, and a
piece may change its inputs in place. Which of them it does change shows in its first run: until
then all are copied, and only those after that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ...profiles.autograd.boundary import storage_key
from ...profiles.errors import RunError


class Watched(NamedTuple):
    """An argument of a run that is under way."""

    name: str
    tensor: Tensor
    version: int


class HandedOver:
    """The inputs of a stage's piece that are handed over, in training or in evaluation."""

    def __init__(self, makers: Mapping[str, Callable[[], Collection[str]]] | None = None) -> None:
        """
        Args:
            makers: by the input's name, what tells which of its outputs the stage that makes it
                keeps for its backward.
        """
        self._makers = makers or {}
        self._changed: set[str] | None = None

    def safe(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Values for a first run of the piece, with copies of what it may change."""
        if not self._makers:
            return values
        copied = self._makers.keys() if self._changed is None else self._changed
        return {name: v.clone() if name in copied else v for name, v in values.items()}

    def watch(self, names: Iterable[str], arguments: Iterable[Any]) -> list[Watched]:
        """Before the piece gets these arguments."""
        if not self._makers:
            return []
        pairs = zip(names, arguments, strict=True)
        return [
            Watched(name, found, found._version)
            for name, found in pairs
            if name in self._makers and isinstance(found, Tensor)
        ]

    def check(self, watched: Iterable[Watched]) -> None:
        """The piece has run. Raises RunError where it has changed what it hadn't before."""
        if not self._makers:
            return
        changed = {each.name for each in watched if each.tensor._version != each.version}
        if self._changed is None:
            self._changed = changed
        elif changed - self._changed:
            raise RunError(
                f"{min(changed - self._changed)!r} is changed in place, and wasn't in the first "
                "run: another stage of this device may need it as it was; make the operation one "
                "that isn't in place, or plan with --stages-per-device 1"
            )

    def kept_elsewhere(self, names: Iterable[str]) -> set[str]:
        """Of these inputs, those whose memory the stage that made them keeps anyway."""
        return {
            name
            for name in names
            if name in self._makers
            and name in self._makers[name]()
            and name not in (self._changed or ())
        }

    def storages_kept_elsewhere(self, watched: Iterable[Watched]) -> set[int]:
        """Their memory, by key."""
        by_name = {each.name: each.tensor for each in watched}
        return {storage_key(by_name[name]) for name in self.kept_elsewhere(by_name)}
