"""A run's weights as Hugging Face's `from_pretrained` loads them (tp-run export --to hf)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import nn

from ...runtime.checkpoint.export import SHARD_BYTES, Weights
from ...runtime.settings import RunSettings
from ..errors import UserError
from ..files import read_file
from ..target import resolve
from ..tasks.hooks import in_one_line
from .model import library, quiet


def write_pretrained(weights: Weights, folder: Path, most: int | None) -> int:
    """As the model's own save_pretrained does it, which knows the names that its loader wants.

    Raises UserError where it can't be, TargetError where the task's model can't be built.
    """
    library("--to hf")
    settings = read_file(weights.run / "settings.json", RunSettings)
    model, prefix = _pretrained(settings.task, resolve(settings.task).model(settings.seed))
    given = {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.named.items()
        if name.startswith(prefix)
    }
    wanted = model.state_dict()
    lost = [name for name in wanted if name not in given]
    other = [n for n in wanted if n in given and wanted[n].shape != given[n].shape]
    if lost or other:
        raise UserError(
            f"--to hf: {settings.task}: its model isn't what the run trained: "
            f"{[*lost, *other][0]!r} {'is new' if lost else 'has another shape'}"
        )
    # Buffers that the model makes anew each time aren't among what it loads.
    model.load_state_dict({name: given[name] for name in wanted})
    with in_one_line("--to hf: save_pretrained failed", UserError), quiet():
        model.save_pretrained(folder, max_shard_size=most or SHARD_BYTES)
    return len(list(folder.glob("*.safetensors")))


def _pretrained(task: str, model: nn.Module) -> tuple[Any, str]:
    """The Hugging Face model in a task's model, and what its names begin with there.

    Raises UserError: there is none, or there are parameters besides.
    """
    base = importlib.import_module("transformers").PreTrainedModel
    # Modules come before what is in them.
    found = next(((n, m) for n, m in model.named_modules() if isinstance(m, base)), None)
    if found is None:
        raise UserError(
            f"--to hf: the model of {task} is a {type(model).__name__}, and has no Hugging Face "
            "model in it; take --to safetensors or dcp"
        )
    prefix = f"{found[0]}." if found[0] else ""
    besides = next((name for name in model.state_dict() if not name.startswith(prefix)), None)
    if besides is not None:
        raise UserError(
            f"--to hf: the model of {task} has {besides!r} beside its {type(found[1]).__name__}, "
            "which from_pretrained couldn't load; take --to safetensors or dcp"
        )
    return found[1], prefix
