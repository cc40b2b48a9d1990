"""Small variants of everything that must profile: the zoo, Hugging Face, the ONNX package's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from timeprest.profiles.zoo import densenet, inception, resnet

ZOO = {
    "mlp": "mlp:width=16,inputs=12",
    "alexnet": "alexnet:size=63,classes=5",
    "vgg11": "vgg11:size=32,classes=5",
    "resnet18": "resnet18:size=32,classes=5",
    "resnet50": "resnet50:size=32,classes=5",
    "densenet121": "densenet121:size=32,classes=5",
    "inception_v3": "inception_v3:size=75,classes=5",
    "gpt2": "gpt2:layers=2,width=16,heads=2,vocabulary=30,context=8",
    "bert": "bert-base:layers=2,width=16,heads=2,vocabulary=30,context=8,length=8",
    "gnmt": "gnmt:layers=3,width=8,vocabulary=30,length=5",
}

HUGGING_FACE = ("gpt2", "bert", "vit", "resnet", "llama", "t5")

needs_hf = pytest.mark.skipif(not find_spec("transformers"), reason="needs timeprest[hf]")

LARGE = ("alexnet", "vgg11")
"""Chains whose linear layers are wide at any size: a billion bytes in float64."""

TARGETS = [
    *(pytest.param(target, id=name) for name, target in ZOO.items() if name not in LARGE),
    *(pytest.param(f"hf:{name}", id=f"hf-{name}", marks=needs_hf) for name in HUGGING_FACE),
]


def all_but(*names: str) -> list[Any]:
    """Those targets without a few, for tests that take long and show the same of them."""
    return [target for target in TARGETS if target.id not in names]


def make_shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks in nets of many equal ones: of each kind one, and one behind another."""
    monkeypatch.setattr(densenet, "BLOCKS", (2, 3, 2))
    monkeypatch.setattr(inception, "POOLED", (64,))
    monkeypatch.setattr(inception, "WIDTHS", (128, 160))
    for name, (block, _) in list(resnet.NETS.items()):
        monkeypatch.setitem(resnet.NETS, name, (block, (2, 2, 1, 1)))


def light_models() -> list[Path]:
    """The light models of the onnx package; none where it isn't installed."""
    found = find_spec("onnx")
    if found is None or found.origin is None:
        return []
    return sorted((Path(found.origin).parent / "backend/test/data/light").glob("*.onnx"))
