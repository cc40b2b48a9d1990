"""Counting the bytes of all tensors alive at once, on any device, as operations run."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that follows every new storage from its making to its end.

    What an operation allocates inside itself and frees again (a convolution's scratch
    memory) isn't seen.

    Attributes:
        live: bytes of the storages made under this mode that are alive now.
        peak: largest `live` since the start or the last `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._note((args, kwargs), count=False)
        result = func(*args, **kwargs)
        self._note(result, count=True)
        return result

    def _note(self, value: Any, count: bool) -> None:
        for tensor in torch.utils._pytree.tree_leaves(value):
            if isinstance(tensor, Tensor):
                self._note_storage(tensor.untyped_storage(), count)

    def _note_storage(self, storage: torch.UntypedStorage, count: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if count else 0

        def gone(_: object) -> None:
            self._known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)
