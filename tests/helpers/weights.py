"""Whether trainings have ended with the same weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from timeprest.runtime.records.run_dir import load_weights


def assert_same_weights(one, other, atol=0.0):
    """Of runs' folders, or by name; to the last bit unless they may be so far apart."""
    found, wanted = (w if isinstance(w, Mapping) else load_weights(w) for w in (one, other))
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)
