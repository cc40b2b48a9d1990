"""Profiles the models that the profiler must take and writes docs/models.md: `make model-table`.

Figures are measured anew each time; the page says on what.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COMMAND = Path(sys.executable).parent / "tp-profile"

NETS = [
    ("MLP", "mlp", 64, "784 → 1024 → 1024 → 10"),
    ("AlexNet", "alexnet", 8, "3×224×224"),
    ("VGG-16", "vgg16:size=32", 32, "3×32×32"),
    ("VGG-16", "vgg16", 4, "3×224×224"),
    ("VGG-19", "vgg19:size=32", 32, "3×32×32"),
    ("ResNet-50", "resnet50:size=64", 32, "3×64×64"),
    ("ResNet-50", "resnet50", 8, "3×224×224"),
    ("ResNet-152", "resnet152:size=32", 32, "3×32×32"),
    ("ResNet-152", "resnet152", 8, "3×224×224"),
    ("Inception-v3", "inception_v3", 4, "3×299×299"),
    ("DenseNet-121", "densenet121", 8, "3×224×224"),
    ("GPT-2 (124 M)", "gpt2:length=128", 4, "128 tokens"),
    (
        "GPT-2 shape",
        "gpt2:layers=8,width=256,heads=8,vocabulary=1000,length=64",
        16,
        "8 × 256, 64 tokens",
    ),
    ("BERT-base", "bert-base", 4, "128 tokens"),
    ("GNMT-like", "gnmt:layers=4,width=512,length=20", 16, "4 + 4 × 512, 20 tokens"),
]
HUGGING_FACE = [
    (name, f"hf:{name.lower()}", 8, "small config")
    for name in ("GPT2", "BERT", "ViT", "ResNet", "Llama", "T5")
]


def onnx_models() -> list[tuple[str, str, int, str]]:
    """The light models that ship inside the onnx package."""
    import onnx

    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    return [(path.stem, str(path), 2, "ONNX file") for path in sorted(folder.glob("*.onnx"))]


def profile(target: str, batch: int) -> tuple[dict[str, Any], float]:
    """The profile, and the seconds that the whole command took."""
    sizes = ",".join(str(size) for size in sorted({max(batch // 2, 1), batch}))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        begin = time.perf_counter()
        subprocess.run(
            [
                COMMAND,
                target,
                *f"-q --batch-size {batch} --micro-batch-sizes {sizes} -o".split(),
                path,
            ],
            check=True,
        )
        return json.loads(path.read_text()), time.perf_counter() - begin


def row(label: str, target: str, batch: int, what: str) -> str:
    """A line of the table."""
    found, took = profile(target, batch)
    whole = found["whole_model"][-1]
    parts = [*found["layers"], *([{"measurements": found["loss"]}] if found["loss"] else [])]
    last = [part["measurements"][-1] for part in parts]
    total = sum(m["forward_s"] + m["backward_s"] for m in last)
    ratio = total / (whole["forward_s"] + whole["backward_s"])
    size = {"float32": 4, "float64": 8}[found["dtype"]]
    parameters = sum(layer["parameter_bytes"] for layer in found["layers"]) // size
    cells = [
        label,
        f"{what}, batch {batch}",
        str(len(found["layers"])),
        f"{parameters:,}",
        f"{whole['saved_bytes'] / 2**20:.1f}",
        f"{whole['forward_s']:.3g}",
        f"{whole['backward_s']:.3g}",
        f"{ratio:.2f}",
        found["front_end"],
        f"{took:.0f}",
    ]
    print(" | ".join(cells), flush=True)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    import torch

    rows = [row(*model) for model in [*NETS, *HUGGING_FACE, *onnx_models()]]
    page = (
        (HERE / "models.head.md")
        .read_text()
        .format(
            cores=os.cpu_count(), machine=platform.machine(), torch=torch.__version__.split("+")[0]
        )
    )
    (HERE / "models.md").write_text(page + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
