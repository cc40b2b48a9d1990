"""Images for Hugging Face models: sized, and scaled as the model's folder says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..errors import TargetError, one_line
from ..tasks.hooks import in_one_line
from .model import Request, library

_FILE = "preprocessor_config.json"
_OTHERS = ("do_flip_channel_order", "do_grayscale", "offset", "rescale_offset")
"""What else preprocessors do to numbers, and isn't done here."""


class PixelScale(NamedTuple):
    """What becomes of a pixel: ``(pixel * factor - mean) / deviation``, these two ``[c, 1, 1]``."""

    factor: float
    mean: Tensor
    deviation: Tensor


def pixel_scale(request: Request) -> PixelScale:
    """As the folder's preprocessor has it; without one pixels from 0 to 255 go to −1 … 1.

    Raises TargetError for a preprocessor that can't be read, or does something else besides.
    """
    folder = Path(request.folder).expanduser()
    file = folder / _FILE
    if request.folder and not folder.is_dir():
        hub = library(request.target, "huggingface_hub")
        file = Path(str(hub.try_to_load_from_cache(request.folder, _FILE)))
    said: Any = {}
    with in_one_line(f"{request.target}: {file}: can't be followed", text=one_line):
        if request.folder and file.is_file():
            said = json.loads(file.read_text(encoding="utf-8"))
        others = [key for key in _OTHERS if said.get(key)]
        factor = float(said.get("rescale_factor", 1 / 255)) if said.get("do_rescale", True) else 1.0
        mean, deviation = torch.zeros(1), torch.ones(1)
        if said.get("do_normalize", True):
            mean, deviation = (
                torch.tensor(said.get(name, 0.5)) for name in ("image_mean", "image_std")
            )
        found = PixelScale(factor, mean.reshape(-1, 1, 1), deviation.reshape(-1, 1, 1))
    if others:
        raise TargetError(
            f"{request.target}: {file}: {others[0]} isn't done here: give pixel_values that the "
            "preprocessor has made, in place of image"
        )
    return found


def pixels(where: str, image: Any, size: int, scale: PixelScale) -> Tensor:
    """An image ``[height, width]`` or ``[height, width, channels]`` as ``[channels, size, size]``.

    Args:
        where: which row, for the error.

    Raises TargetError for another shape, or numbers that aren't pixels from 0 to 255 where the
    scale is for these.
    """
    # Pillow's may hold numbers of colours.
    given = np.asarray(image.convert("RGB") if hasattr(image, "convert") else image)
    found = given[..., None].repeat(3, -1) if given.ndim == 2 else given
    low, high = float(found.min()), float(found.max())
    wrong = ""
    if found.ndim != 3 or found.shape[-1] not in (1, 3, 4):
        wrong = f"shape {list(found.shape)}; it must be height, width and channels (1, 3 or 4)"
    elif scale.factor != 1 and (
        low < 0 or high > 255 or (given.dtype.kind in "bf" and 0 < high <= 1)
    ):
        wrong = f"numbers from {low:g} to {high:g}; pixels go from 0 to 255"
    if wrong:
        raise TargetError(
            f"{where}: its image has {wrong}; or give pixel_values as the model takes them"
        )
    scaled = torch.from_numpy(found[..., :3].astype(np.float32) * np.float32(scale.factor))
    sized = functional.interpolate(
        scaled.permute(2, 0, 1)[None], size=(size, size), mode="bilinear", antialias=True
    )
    return (sized[0] - scale.mean) / scale.deviation
