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
from pathlib import Path

from torch import fx

from .builder import GraphBuilder
from .file import read_file
from .operators import handler_of


def import_onnx(path: str | Path, *, sizes: Mapping[str, int] | None = None) -> fx.GraphModule:
    """Import an ONNX file (with its external data), in training mode.

    The module takes tensors ``[m, *input.shape]`` for any batch size m, and gives one tensor,
    or a tuple of them where the file has several outputs.

    Arguments and errors as of `read_file`; TargetError, too, where the file holds an operator or a
    setting of one that can't be imported.
    """
    file = read_file(path, sizes)
    handlers = [handler_of(node, file.path) for node in file.nodes]
    builder = GraphBuilder(file)
    for node, handler in zip(file.nodes, handlers, strict=True):
        builder.add(node, handler)
    return builder.finish()
