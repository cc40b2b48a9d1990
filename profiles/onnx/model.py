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

import torch
from torch import fx

from ..errors import TargetError
from .builder import GraphBuilder, Operation
from .file import FileInput, OnnxFile, OnnxNode, read_file
from .operators import OPERATORS


@dataclass(frozen=True)
class OnnxInput:
    """An input: the shape of one sample (without the batch dimension) and the dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


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
    file = read_file(path)
    batch = _batch_size(file)
    inputs = _inputs(file, sizes or {})
    builder = GraphBuilder(file, batch or 1, fixed=batch is not None)
    for x in inputs:
        builder.add_input(x.name, x.shape, x.dtype)
    for name, tensor in file.initializers.items():
        builder.values[name] = builder.constant(name, tensor, trainable=True)
    for node in file.nodes:
        _add(builder, file, node)
    return OnnxModel(builder.finish(), inputs)


def _add(builder: GraphBuilder, file: OnnxFile, node: OnnxNode) -> None:
    builder.begin(node)
    handler = OPERATORS.get(node.op_type) if node.domain == "" else None
    if handler is None:
        raise TargetError(
            f"{file.path}: node {node.name!r} is a {node.op_type!r} (domain "
            f"{node.domain or 'ai.onnx'}): this operator isn't known; the {len(OPERATORS)} known "
            f"ones are the keys of {OPERATORS_PATH}"
        )
    operation = Operation(node, builder)
    try:
        results = handler(operation)
    except TargetError:
        raise
    except Exception as error:  # a broken node: attributes missing or of another kind
        reason = " ".join(str(error).split())[:200]
        raise builder.fail(f"can't be imported: {type(error).__name__}: {reason}") from error
    operation.finish(results)


OPERATORS_PATH = "timeprest.profiles.onnx.operators.OPERATORS"


def _batch_size(file: OnnxFile) -> int | None:
    """The batch size that the file fixes, or None."""
    fixed: dict[int, str] = {}
    for x in file.inputs:
        if not x.dims:
            raise TargetError(
                f"{file.path}: input {x.name!r} has no dimensions; its first must be the batch"
            )
        if isinstance(x.dims[0], int):
            fixed.setdefault(x.dims[0], x.name)
    if len(fixed) > 1:
        (one, first), (other, second) = list(fixed.items())[:2]
        raise TargetError(
            f"{file.path}: the first dimension of every input must be the batch, but it is {one} "
            f"for {first!r} and {other} for {second!r}"
        )
    if 0 in fixed:
        raise TargetError(f"{file.path}: input {fixed[0]!r} has a batch of 0")
    return next(iter(fixed), None)


def _inputs(file: OnnxFile, sizes: Mapping[str, int]) -> tuple[OnnxInput, ...]:
    if not file.inputs:
        raise TargetError(f"{file.path}: has no inputs")
    free = {d for x in file.inputs for d in x.dims[1:] if isinstance(d, str)}
    for name, size in sizes.items():
        if name not in free:
            shown = ", ".join(sorted(free)) or "none"
            raise TargetError(
                f"{file.path}: has no free dimension {name!r} (besides the batch); it has {shown}"
            )
        if size < 1:
            raise TargetError(f"{file.path}: the size of {name!r} must be at least 1, not {size}")
    return tuple(
        OnnxInput(
            x.name,
            tuple(_size(file, x, k, sizes) for k in range(1, len(x.dims))),
            x.dtype,
        )
        for x in file.inputs
    )


def _size(file: OnnxFile, x: FileInput, k: int, sizes: Mapping[str, int]) -> int:
    dim = x.dims[k]
    if isinstance(dim, int):
        return dim
    if dim is None:
        raise TargetError(
            f"{file.path}: dimension {k + 1} of input {x.name!r} is free and has no name; export "
            "the model with a size for it, or a name"
        )
    if dim not in sizes:
        raise TargetError(
            f"{file.path}: dimension {k + 1} of input {x.name!r} is free: give a size for {dim!r}"
        )
    return sizes[dim]
