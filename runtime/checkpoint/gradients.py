"""Gradient files: what each update of a run stepped with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...profiles.errors import FileError
from ..prepare.tied_parameters import model_parameters
from ..records.run_dir import save_tensors


class GradientFiles:
    """Writes a module's gradients whenever its optimizer is about to step.

    Args:
        folder: gets a file for each update, counted from 0.
        optimizer: None: there is nothing to train, and nothing is written.
        names: for each name of a parameter, the first that the whole model has for it: pieces may
            know a tied one by another.
    """

    def __init__(
        self,
        folder: Path,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        names: Mapping[str, str],
    ) -> None:
        self.folder = folder
        self.module = module
        self.names = names
        self.updates = 0
        if optimizer is None:
            return
        try:
            optimizer.register_step_pre_hook(self._write)
        except AttributeError:
            # One around another that leaves torch's own initialization out.
            step = optimizer.step

            def writing(*arguments: Any, **more: Any) -> Any:
                self._write()
                return step(*arguments, **more)

            optimizer.step = writing  # type: ignore[method-assign]

    def _write(self, *_: Any) -> None:
        found = {
            name: p.grad
            for name, p in model_parameters(self.module, self.names)
            if p.grad is not None
        }
        save_tensors(self.folder / f"{self.updates}.safetensors", found)
        self.updates += 1


def gradients_in(folders: Sequence[Path], update: int) -> Iterator[tuple[str, Tensor]]:
    """All gradients of an update, one after another: only one is in memory.

    Args:
        folders: of all stages. Those without a file for the update had nothing to train.

    Raises FileError for a broken file.
    """
    from safetensors import SafetensorError, safe_open

    for folder in folders:
        path = folder / f"{update}.safetensors"
        if not path.exists():
            continue
        with ExitStack() as stack:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                names = sorted(file.keys())
            except (OSError, SafetensorError) as error:
                raise FileError(f"{path}: can't be read: {error}") from None
            for name in names:
                yield name, file.get_tensor(name)
