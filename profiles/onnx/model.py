"""An ONNX file as a torch.fx graph that can be trained.

Layer-like operators become modules, the others function calls; every fx node says in
``meta["onnx"]`` which ONNX node it was made for: ``(name, op_type)``. Float constants are
parameters where they are data of an operator, unless a `Constant` node holds them.

The first dimension of every input is the batch. Files often fix it, mostly to 1: the imported
graph takes any batch size all the same. Reshapes to fixed sizes follow the batch (`follow_batch`),
an Expand to the file's batch size leaves the batch as it is, a Concat repeats what the file has
for its one sample; a node that can't follow, or that would mix samples, is refused with its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from .builder import GraphBuilder
from .file import OnnxInput, read_file
from .operators import handler_of


@dataclass(frozen=True)
class OnnxModel:
    """The imported graph, in training mode, and its inputs in the order of its placeholders."""

    module: fx.GraphModule
    inputs: tuple[OnnxInput, ...]


def import_onnx(path: str | Path, *, sizes: Mapping[str, int] | None = None) -> OnnxModel:
    """Import an ONNX file (with its external data).

    The module takes tensors ``[m, *input.shape]`` for any batch size m, and gives one tensor,
    or a tuple of them where the file has several outputs.

    Args:
        path: the file.
        sizes: sizes of its named free dimensions other than the batch, as {"sequence": 64}.

    Raises:
        FileError: the file is missing, broken, no ONNX, or its external data is missing.
        TargetError: `onnx` isn't installed; an input has a free dimension without a size; or
            the file holds an operator or a setting of one that can't be imported.
    """
    file = read_file(path, sizes)
    handlers = [handler_of(node, file.path) for node in file.nodes]
    builder = GraphBuilder(file)
    for node, handler in zip(file.nodes, handlers, strict=True):
        builder.add(node, handler)
    return OnnxModel(builder.finish(), file.inputs)
