"""Reading an ONNX file into plain data: nodes, inputs, and constants as torch tensors.

The first dimension of every input is the batch. The only module that imports `onnx`, and only when
a file is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import FileError, TargetError, one_line
from ..files import is_file
from ..tasks.hooks import in_one_line

# The numbers are onnx.TensorProto.DataType's.
_DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}
_PROTOBUF_LIMIT_BYTES = 2**31 - 1

Size: TypeAlias = "int | str"
"""A dimension as the file has it: a size, or the name of a free one. One without a name has one of
its own, as ``x[2]``: two of them needn't be equal."""

_NAMELESS = frozenset({"", "?", "*", "-1", "None", "unknown"})
"""What exporters write for any free dimension."""


@dataclass(frozen=True)
class OnnxNode:
    """One ONNX node. Its name is its first output's where the file gives none."""

    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    """Names of values; "" for an optional input left out."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    """Numbers, strings, lists of them, and torch tensors."""


@dataclass(frozen=True)
class OnnxInput:
    """An input: the shape of one sample (without the batch dimension) and the dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class OnnxFile:
    """What a file says, without what its outputs don't need.

    Attributes:
        batch: the batch size that it fixes; None: it is free.
    """

    path: str
    opset: int
    nodes: tuple[OnnxNode, ...]
    inputs: tuple[OnnxInput, ...]
    batch: int | None
    outputs: tuple[str, ...]
    initializers: Mapping[str, Tensor]


def read_file(path: str | Path, sizes: Mapping[str, int] | None = None) -> OnnxFile:
    """Read the file and its external data.

    Args:
        sizes: sizes of its named free dimensions other than the batch, as {"sequence": 64}.

    Raises:
        FileError: it is missing, broken, too large, no ONNX, or its external data is missing.
        TargetError: the graph holds what can't be imported, or an input
            has a free dimension without a size.
    """
    onnx = _library(path)
    model = _load(Path(path), onnx)
    graph = model.graph
    if graph.sparse_initializer:
        raise TargetError(f"{path}: holds sparse initializers, which can't be imported")
    outputs = tuple(value.name for value in graph.output)
    protos, needed = _live_nodes(graph.node, outputs)
    nodes = tuple(_node(str(path), proto, onnx) for proto in protos)
    batch, described = _inputs(str(path), _input_values(str(path), graph), sizes or {})
    return OnnxFile(
        path=str(path),
        opset=_opset(str(path), model),
        nodes=nodes,
        inputs=described,
        batch=batch,
        outputs=outputs,
        initializers={
            proto.name: _tensor(str(path), proto, onnx)
            for proto in graph.initializer
            if proto.name in needed
        },
    )


def _library(path: str | Path) -> ModuleType:
    """Raises TargetError where it isn't installed."""
    try:
        import onnx
    except ImportError as error:
        raise TargetError(
            f"{path}: needs the library onnx ({error}): in the checkout, pip install -e '.[onnx]'"
        ) from None
    return onnx


def open_inputs(path: str | Path) -> dict[str, tuple[Size, ...]]:
    """For each input the dimensions of one sample, free ones among them; weights aren't read.

    Raises FileError and TargetError as `read_file` does.
    """
    values = _input_values(str(path), _load(Path(path), _library(path), weights=False).graph)
    return {value.name: _dims_and_dtype(str(path), value)[0][1:] for value in values}


def sizes_in(
    path: str | Path, inputs: Mapping[str, tuple[Size, ...]], shapes: Sequence[tuple[int, ...]]
) -> dict[str, int]:
    """Sizes of named free dimensions, from the shape of one sample of each input.

    Raises TargetError where a shape has not as many dimensions as an input with free ones, or two
    shapes give different sizes.
    """
    found: dict[str, tuple[int, str]] = {}
    for (name, dims), shape in zip(inputs.items(), shapes, strict=True):
        # Where the file knows all sizes, what is given is tried as it is.
        if len(dims) != len(shape) and not all(isinstance(size, int) for size in dims):
            raise TargetError(
                f"{path}: a sample of input {name!r} has {len(dims)} dimensions, but --input gives "
                f"{len(shape)}: write it like {_example(name, dims)}"
            )
        for free, size in zip(dims, shape, strict=False):
            if not isinstance(free, str):
                continue
            known, where = found.setdefault(free, (size, name))
            if known != size:
                raise TargetError(
                    f"{path}: --input gives the free dimension {free!r} two sizes, {known} in "
                    f"{where!r} and {size} in {name!r}: give it one"
                )
    return {free: size for free, (size, _) in found.items()}


def dtype_of(number: int) -> torch.dtype | None:
    """The torch dtype for ONNX's number of a tensor type; None where there is none."""
    return _DTYPES.get(number)


def _input_values(path: str, graph: Any) -> list[Any]:
    constants = {proto.name for proto in graph.initializer}
    values = [value for value in graph.input if value.name not in constants]
    if not values:
        raise TargetError(f"{path}: has no inputs")
    return values


def _load(path: Path, onnx: ModuleType, *, weights: bool = True) -> Any:
    if not is_file(path):
        raise FileError(f"{path}: no such file")
    if path.stat().st_size > _PROTOBUF_LIMIT_BYTES:
        raise FileError(
            f"{path}: is larger than 2 GiB, more than an ONNX file can hold; save its weights as "
            "external data"
        )
    with _refused(f"{path}: is no ONNX file"):
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    if not model.ir_version or not model.opset_import or not model.graph.output:
        raise FileError(f"{path}: is no ONNX file: it holds no graph with an output")
    if not weights:
        return model
    with _refused(f"{path}: its external data can't be read"):
        onnx.external_data_helper.load_external_data_for_model(model, str(path.parent))
    if model.functions:
        import onnx.inliner

        # Not those that call themselves.
        with _refused(f"{path}: its functions can't be put in where they are called"):
            model = onnx.inliner.inline_local_functions(model)
    return model


def _refused(what: str) -> AbstractContextManager[None]:
    """For onnx: protobuf's kinds of errors differ between its versions."""
    return in_one_line(what, FileError, text=lambda error: one_line(error)[:200])


def _opset(path: str, model: Any) -> int:
    versions = [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")]
    if not versions:
        raise TargetError(f"{path}: uses no operators of the standard ONNX domain")
    return int(versions[0])


def _live_nodes(protos: Any, outputs: tuple[str, ...]) -> tuple[list[Any], set[Any]]:
    """Nodes that the outputs need, in the file's order; and the names of all needed values."""
    import networkx as nx

    # Values by their names, nodes by their positions.
    graph = nx.DiGraph()
    graph.add_nodes_from(outputs)
    for k, proto in enumerate(protos):
        graph.add_edges_from((name, k) for name in proto.input if name)
        graph.add_edges_from((k, name) for name in proto.output if name)
    needed = set(outputs).union(*(nx.ancestors(graph, name) for name in outputs))
    return [proto for k, proto in enumerate(protos) if k in needed], needed


def _node(path: str, proto: Any, onnx: ModuleType) -> OnnxNode:
    name = proto.name or proto.output[0]
    attributes: dict[str, Any] = {}
    for attribute in proto.attribute:
        kinds = onnx.AttributeProto
        if attribute.type in (kinds.GRAPH, kinds.GRAPHS):
            raise TargetError(
                f"{path}: node {name!r} is a {proto.op_type!r}, which holds a graph of its own "
                "(control flow); export the model without it"
            )
        what = f"{path}: node {name!r} is a {proto.op_type!r}: its attribute {attribute.name!r}"
        # Text that isn't UTF-8, or an attribute without a value.
        with _refused(f"{what} is broken"):
            value = onnx.helper.get_attribute_value(attribute)
            if attribute.type == kinds.STRING:
                value = value.decode()
            elif attribute.type == kinds.STRINGS:
                value = [item.decode() for item in value]
        if attribute.type == kinds.TENSOR:
            value = _tensor(path, value, onnx)
        elif attribute.type in (kinds.INTS, kinds.FLOATS):
            value = list(value)
        elif attribute.type not in (kinds.INT, kinds.FLOAT, kinds.STRING, kinds.STRINGS):
            raise TargetError(
                f"{path}: node {name!r} is a {proto.op_type!r}: its attribute "
                f"{attribute.name!r} is of a kind that can't be imported"
            )
        attributes[attribute.name] = value
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    return OnnxNode(
        name, proto.op_type, domain, tuple(proto.input), tuple(proto.output), attributes
    )


def _tensor(path: str, proto: Any, onnx: ModuleType) -> Tensor:
    dtype = _DTYPES.get(proto.data_type)
    if dtype is None:
        kinds = onnx.TensorProto.DataType
        if proto.data_type not in kinds.values():
            raise FileError(
                f"{path}: the constant {proto.name!r} is broken: ONNX has no type {proto.data_type}"
            )
        kind = kinds.Name(proto.data_type)
        raise TargetError(f"{path}: the constant {proto.name!r} is of type {kind}: not supported")
    with _refused(f"{path}: the constant {proto.name!r} is broken"):
        array = onnx.numpy_helper.to_array(proto)
    if dtype == torch.bfloat16:  # numpy has no such type; float32 holds it exactly
        return torch.tensor(array.astype("float32")).to(dtype)
    return torch.tensor(array)


# Inputs: their first dimension is the batch, and every other one must be known ------------------


def _inputs(
    path: str, values: Sequence[Any], sizes: Mapping[str, int]
) -> tuple[int | None, tuple[OnnxInput, ...]]:
    """The batch size that the file fixes, or None; and the inputs."""
    found = [(value.name, *_dims_and_dtype(path, value)) for value in values]
    shown = {name: _example(name, dims[1:]) for name, dims, _ in found}
    batch = _batch_size(path, {name: dims for name, dims, _ in found})
    free = {d for _, dims, _ in found for d in dims[1:] if isinstance(d, str)}
    for name, size in sizes.items():
        if name not in free:
            has = ", ".join(sorted(free)) or "none"
            raise TargetError(
                f"{path}: has no free dimension {name!r} (besides the batch); it has {has}"
            )
        if size < 1:
            raise TargetError(f"{path}: the size of {name!r} must be at least 1, not {size}")

    def known(name: str, k: int, size: Size) -> int:
        if isinstance(size, int):
            return size
        if size not in sizes:
            what = "it" if size == _own_name(name, k) else repr(size)
            raise TargetError(
                f"{path}: dimension {k} of input {name!r} is free: give a size for {what}, with "
                f"the shape of one sample for each input, like {shown[name]}; "
                "of timeprest.onnx they are its `inputs`"
            )
        return sizes[size]

    return batch, tuple(
        OnnxInput(name, tuple(known(name, k, d) for k, d in enumerate(dims[1:], 2)), dtype)
        for name, dims, dtype in found
    )


def _example(name: str, dims: Sequence[Size]) -> str:
    """The option that gives an input's free dimensions a size."""
    return f"--input {name}={'x'.join(str(d) if isinstance(d, int) else '16' for d in dims)}:DTYPE"


def _dims_and_dtype(path: str, value: Any) -> tuple[tuple[Size, ...], torch.dtype]:
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        raise TargetError(f"{path}: input {value.name!r} isn't a tensor")
    dtype = _DTYPES.get(kind.elem_type)
    if dtype is None:
        raise TargetError(f"{path}: input {value.name!r} has an element type without a torch dtype")
    if not kind.HasField("shape"):
        raise TargetError(
            f"{path}: input {value.name!r} has no shape; export the model with its input shapes"
        )
    dims: list[Size] = []
    for k, dim in enumerate(kind.shape.dim, 1):
        # Some exporters write -1 for a free dimension.
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            dims.append(int(dim.dim_value))
        else:
            nameless = dim.dim_param in _NAMELESS
            dims.append(_own_name(value.name, k) if nameless else dim.dim_param)
    return tuple(dims), dtype


def _own_name(name: str, k: int) -> str:
    """Of an input's k-th dimension, counted from 1, where the file has none."""
    return f"{name}[{k}]"


def _batch_size(path: str, inputs: Mapping[str, Sequence[Size]]) -> int | None:
    fixed: dict[int, str] = {}
    for name, dims in inputs.items():
        if not dims:
            raise TargetError(
                f"{path}: input {name!r} has no dimensions; its first must be the batch"
            )
        if isinstance(dims[0], int):
            fixed.setdefault(dims[0], name)
    if len(fixed) > 1:
        (one, first), (other, second) = list(fixed.items())[:2]
        raise TargetError(
            f"{path}: the first dimension of every input must be the batch, but it is {one} "
            f"for {first!r} and {other} for {second!r}"
        )
    if 0 in fixed:
        raise TargetError(f"{path}: input {fixed[0]!r} has a batch of 0")
    return next(iter(fixed), None)
