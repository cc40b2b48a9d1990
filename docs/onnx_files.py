"""Profiles, plans and trains ONNX files, and prints a row for each: docs/profiling.md's table.

python docs/onnx_files.py FILE[:INPUT=SHAPE,…] …: the shape of one sample of each input whose sizes
the file leaves open, as ``reader.onnx:ids=64``. Trained are two mini-batches of four samples in two
micro-batches, on random inputs, in three stages, and held against training without a pipeline.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import timeprest
import torch
from timeprest.profiles.errors import TimeprestError
from timeprest.profiles.onnx.file import open_inputs, read_file, sizes_in
from torch import Tensor

SAMPLES = 8


class File:
    """A task around a file, on random inputs: what the model gives is to become small."""

    def __init__(self, path: str, shapes: dict[str, tuple[int, ...]]) -> None:
        self.path, self.shapes = path, shapes or None
        own = open_inputs(path)
        sizes = sizes_in(path, own, [shapes[name] for name in own]) if shapes else {}
        self.inputs = read_file(path, sizes).inputs

    def model(self) -> Any:
        return timeprest.onnx(self.path, inputs=self.shapes)()

    def data(self, split: str) -> list[Any]:
        numbers = torch.Generator().manual_seed(0)
        tensors = [
            torch.randn(SAMPLES, *x.shape, generator=numbers).to(x.dtype)
            if x.dtype.is_floating_point
            else torch.randint(0, 2, (SAMPLES, *x.shape), generator=numbers).to(x.dtype)
            for x in self.inputs
        ]
        each = zip(*tensors, strict=True)
        return [(x if len(tensors) > 1 else x[0], 0) for x in each]

    def loss(self, output: Any, target: Tensor) -> Tensor:
        outputs = output if isinstance(output, tuple) else (output,)
        floats = [o for o in outputs if o.is_floating_point()]
        return torch.stack([o.square().mean() for o in floats]).sum()

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-4)


def row(argument: str) -> str:
    """The table's row of a file."""
    path, _, shapes = argument.partition(":")
    given = {
        name: tuple(int(size) for size in shape.split("x"))
        for name, _, shape in (text.partition("=") for text in filter(None, shapes.split(",")))
    }
    done: list[str] = []
    layers = ""
    try:
        task = File(path, given)
        found = timeprest.profile(task, batch_size=4, micro_batch_sizes=[2], seconds=0)
        layers = str(len(found.layers))
        done.append("profiled")
        plan = timeprest.plan(
            found, devices=3, stages=3, variant="gpipe", micro_batches=2, memory="64GiB"
        )
        done.append("planned")
        report = timeprest.check(plan, task=task, inline=True, steps=2)
        done.append(f"trained: {report.verdict}")
    except TimeprestError as error:
        done.append(str(error).split(path)[-1].strip(": "))
    where = Path(path)
    return f"| {where.parent.name}/{where.name} | {shapes} | {layers} | {', '.join(done)} |"


if __name__ == "__main__":
    print("| file | inputs | layers | |\n|---|---|---|---|")
    for argument in sys.argv[1:]:
        print(row(argument), flush=True)
