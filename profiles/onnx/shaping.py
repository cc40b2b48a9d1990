"""Operators that move elements about, and arithmetic on shapes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from . import functions as functions
from .builder import Handler, Operation
from .file import dtype_of
from .values import Constant, Dynamic, Operand, Setting, follow_batch


def reshape(op: Operation) -> Operand:
    target = op.setting(1) if op.opset >= 5 else tuple(op.attribute("shape"))
    allow_zero = bool(op.attribute("allowzero", 0))
    data = op.input(0)
    if isinstance(data, Constant) or data.host:
        return op.call(functions.reshape, data, target, allow_zero, moves=True, reshapes=True)
    if isinstance(target, Setting):
        found = _one_free_size(target)
        if found is not None and data.carries_batch:
            # Where the batch is, its sizes say.
            sizes, place = target.value.probes[0].tolist(), found.index(-1)
            axis = data.batch and follow_batch(
                op.shape(), data.batch, sizes, op.builder.batch, [place]
            )
            return op.call(torch.reshape, data, found, batch=axis)
        return op.call(functions.reshape, data, target, allow_zero)
    full = _resolved(op, target, allow_zero)
    if op.builder.fixed and data.carries_batch and target.count(-1) <= 1:
        return _reshape_with_batch(op, data, full)
    if 0 in target and not allow_zero:
        return op.call(functions.reshape, data, target, allow_zero)
    return op.call(torch.reshape, data, target)


def _one_free_size(target: Setting) -> tuple[int, ...] | None:
    """The sizes, with -1 for the one that depends on the batch, which the others fix; None where
    more do so."""
    small, large = (x.tolist() for x in target.value.probes)
    differ = [k for k in range(len(small)) if small[k] != large[k]]
    if len(differ) != 1 or -1 in small or 0 in small:
        return None
    return tuple(-1 if k == differ[0] else size for k, size in enumerate(small))


def _resolved(op: Operation, target: tuple[int, ...], allow_zero: bool) -> tuple[int, ...]:
    """All sizes after a reshape, for the file's batch size."""
    shape = op.shape()
    sizes = [
        shape[k] if size == 0 and not allow_zero and k < len(shape) else size
        for k, size in enumerate(target)
    ]
    known = prod(size for size in sizes if size != -1)
    count = prod(shape)
    if sizes.count(-1) > 1 or (-1 in sizes and (not known or count % known)):
        raise op.fail(f"its target {list(target)} doesn't fit the shape {list(shape)}")
    full = tuple(count // known if size == -1 else size for size in sizes)
    if prod(full) != count:
        raise op.fail(f"its target {list(target)} doesn't fit the shape {list(shape)}")
    return full


def _reshape_with_batch(op: Operation, data: Dynamic, full: tuple[int, ...]) -> Operand:
    """A reshape whose target the file gives for its fixed batch: see `follow_batch`."""
    batch = op.builder.batch
    found = follow_batch(op.shape(), data.batch, full, batch) if data.batch else None
    if found is None:
        raise op.fail(
            f"reshapes {list(op.shape())} to {list(full)} for a batch of {batch}, which doesn't "
            "tell where the batch is; export the model with a free batch dimension"
        )
    target = tuple(-1 if k == found.dim else size for k, size in enumerate(full))
    return op.call(torch.reshape, data, target, batch=found)


def flatten(op: Operation) -> Operand:
    shape = op.shape()
    axis = op.attribute("axis", 1)
    axis = len(shape) if axis == len(shape) else op.axis(axis)
    full = (prod(shape[:axis]), prod(shape[axis:]))
    data = op.input(0)
    if isinstance(data, Constant) or not data.carries_batch:
        return op.call(functions.reshape, data, full, True, moves=True, reshapes=True)
    batch = op.batch_dim()
    if axis == 1 and batch == 0 and len(shape) > 1:
        return op.module(nn.Flatten(), data)
    if op.builder.fixed:
        return _reshape_with_batch(op, data, full)
    if batch is None:
        raise op.fail("can't tell where the batch is in its input")
    target = (-1, full[1]) if batch < axis else (full[0], -1)
    return op.call(torch.reshape, data, target)


def expand(op: Operation) -> Operand:
    data, target = op.input(0), op.setting(1)
    if isinstance(data, Dynamic) and data.carries_batch and data.batch is not None:
        # Where the data has the batch already, 1 leaves it as it is.
        place = data.batch.dim - len(op.shape())
        if isinstance(target, Setting):
            found = _one_free_size(target)
            if found is not None and -len(found) <= place and found[place] == -1:
                target = tuple(1 if size == -1 else size for size in found)
        elif op.builder.fixed and len(target) >= -place and target[place] == op.shape()[place]:
            target = (*target[: len(target) + place], 1, *target[len(target) + place + 1 :])
    return op.call(functions.expand, data, target, moves=True)


def transpose(op: Operation) -> Operand:
    rank = len(op.shape())
    order = tuple(op.attribute("perm", range(rank - 1, -1, -1)))
    return op.call(torch.permute, op.input(0), order, moves=True, reshapes=True)


def _axes(op: Operation) -> tuple[int, ...] | None:
    """Of Squeeze and Unsqueeze: an attribute before opset 13, an input since."""
    found = op.attribute("axes") if op.opset < 13 else op.known(1, "axes")
    return None if found is None else tuple(found)


def squeeze(op: Operation) -> Operand:
    axes = _axes(op)
    shape = op.shape()
    data = op.input(0)
    if axes is None:
        # A batch of 1 is a batch all the same.
        large = data.probes[1].shape if isinstance(data, Dynamic) else shape
        axes = tuple(k for k, size in enumerate(shape) if size == 1 and large[k] == 1)
    axes = tuple(op.axis(axis) for axis in axes)
    return op.call(functions.squeeze, data, axes, moves=True, reshapes=True)


def unsqueeze(op: Operation) -> Operand:
    axes = _axes(op)
    if axes is None:
        raise op.fail("lacks its axes")
    return op.call(functions.unsqueeze, op.input(0), axes, moves=True, reshapes=True)


def concat(op: Operation) -> Operand:
    parts = [op.input(k) for k in range(len(op.inputs))]
    axis = op.axis(op.attribute("axis", 1))
    leader = next((x for x in parts if isinstance(x, Dynamic) and x.carries_batch), None)
    if leader is not None and leader.batch is not None and leader.batch.dim != axis:
        # What the file has for its one sample alone is the same for every sample.
        dim = leader.batch.dim
        for k, part in enumerate(parts):
            alone = isinstance(part, Constant) or not part.carries_batch
            if op.builder.fixed and alone and op.shape(k)[dim] == 1 == op.builder.batch:
                parts[k] = op.call(functions.expand_as, part, dim, leader)
    return op.call(functions.concatenate, tuple(parts), axis, moves=True)


def split(op: Operation) -> tuple[Operand, ...]:
    axis = op.axis(op.attribute("axis", 0))
    sizes = op.known(1, "split") if op.opset >= 13 else op.attribute("split")
    size = op.shape()[axis]
    if sizes is None:
        count = op.attribute("num_outputs", len(op.node.outputs))
        each = -(-size // count)
        sizes = [min(each, size - k * each) for k in range(count)]
        if min(sizes) < 0:
            raise op.fail(f"can't split {size} entries into {count} parts")
    return op.call_many(torch.split, op.input(0), tuple(sizes), axis)


def slice_(op: Operation) -> Operand:
    starts: Any
    if op.opset < 10:
        starts, ends = tuple(op.attribute("starts")), tuple(op.attribute("ends"))
        axes, steps = op.attribute("axes"), None
    else:
        starts, ends = op.setting(1), op.setting(2)
        axes, steps = op.known(3, "axes"), op.known(4, "steps")
    count = starts.value.probes[0].numel() if isinstance(starts, Setting) else len(starts)
    axes = tuple(op.axis(axis) for axis in (range(count) if axes is None else axes))
    steps = (1,) * count if steps is None else steps
    return op.call(functions.slice_axes, op.input(0), starts, ends, axes, steps, moves=True)


def gather(op: Operation) -> Operand:
    axis = op.axis(op.attribute("axis", 0))
    indices = op.input(1)
    if isinstance(indices, Constant) and indices.tensor.dim() == 0:
        place = int(indices.tensor)
        return op.call(torch.select, op.input(0), axis, place, moves=True)
    return op.call(functions.gather, op.input(0), indices, axis, moves=True)


def gather_elements(op: Operation) -> Operand:
    axis = op.axis(op.attribute("axis", 0))
    return op.call(functions.gather_elements, op.input(0), op.input(1), axis)


def shape(op: Operation) -> Operand:
    start, end = op.attribute("start", 0), op.attribute("end")
    return op.call(functions.shape_of, op.input(0), start, end, moves=True)


def identity(op: Operation) -> Operand:
    found = op.input(0)
    if isinstance(found, Constant):
        found.shared |= op.builder.uses[op.node.outputs[0]] > 1
    return found


def cast(op: Operation) -> Operand:
    op.ignore("saturate", "round_mode")  # of 8-bit floats, which aren't known here
    dtype = dtype_of(op.attribute("to"))
    if dtype is None:
        raise op.fail("casts to a type that torch has no dtype for")
    if dtype == op.tensor(0).dtype:
        return identity(op)
    return op.call(functions.cast, op.input(0), dtype, moves=True, reshapes=True)


def cast_like(op: Operation) -> Operand:
    op.ignore("saturate", "round_mode")
    return op.call(functions.cast, op.input(0), op.tensor(1).dtype, moves=True, reshapes=True)


def constant(op: Operation) -> Operand:
    for name in ("value", "value_float", "value_floats", "value_int", "value_ints"):
        value = op.attribute(name)
        if value is not None:
            break
    else:
        raise op.fail("has no value of a kind that can be imported")
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=torch.float32 if "float" in name else torch.int64)
    name = op.node.outputs[0]
    return op.builder.constant(name, value, trainable=name in op.builder.weights)


def constant_of_shape(op: Operation) -> Operand:
    value = op.attribute("value", torch.zeros(1))
    target = op.setting(0)
    arguments = (target, value.item(), value.dtype)
    if isinstance(target, Setting):
        return op.call(functions.constant_of_shape, *arguments)
    tensor = functions.constant_of_shape(*arguments)
    return op.builder.constant(op.node.outputs[0], tensor, trainable=True)


def tile(op: Operation) -> Operand:
    return op.call(functions.tile, op.input(0), op.setting(1), moves=True)


def trilu(op: Operation) -> Operand:
    function = torch.triu if op.attribute("upper", 1) else torch.tril
    return op.call(function, op.input(0), op.known(1, "diagonal", 0))


def pad(op: Operation) -> Operand:
    mode = op.attribute("mode", "constant")
    modes = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    if mode not in modes:
        raise op.fail(f"its mode is {mode!r}, which isn't known")
    rank = len(op.shape())
    if op.opset < 11:
        pads, value = tuple(op.attribute("pads")), op.attribute("value", 0.0)
        axes = None
    else:
        pads, value = op.known(1, "pads"), op.known(2, "value", 0.0)
        axes = op.known(3, "axes")
    places = [op.axis(axis) for axis in (range(rank) if axes is None else axes)]
    full = [0] * (2 * rank)
    for k, axis in enumerate(places):
        full[axis], full[rank + axis] = pads[k], pads[len(places) + k]
    if mode != "constant":
        return _pad_images(op, full, modes[mode])
    value = value[0] if isinstance(value, tuple) else value
    return op.call(functions.pad, op.input(0), tuple(full), "constant", value)


def _pad_images(op: Operation, pads: list[int], mode: str) -> Operand:
    """Other modes: torch has them for the last dimensions of images only."""
    rank = len(pads) // 2
    first = 1 if rank == 2 else 2
    if not 2 <= rank <= 5 or any(pads[k] or pads[rank + k] for k in range(first)):
        raise op.fail(f"pads other than spatial dimensions with mode {mode!r}: not supported")
    spatial = (*pads[first:rank], *pads[rank + first :])
    return op.call(functions.pad, op.input(0), spatial, mode, 0.0)


def blocks(function: Callable[..., Tensor]) -> Handler:
    def handle(op: Operation) -> Operand:
        block = op.attribute("blocksize")
        if function is functions.space_to_depth:
            return op.call(function, op.input(0), block)
        column_major = op.attribute("mode", "DCR") == "CRD"
        return op.call(function, op.input(0), block, column_major)

    return handle


SHAPING: dict[str, Handler] = {
    "Cast": cast,
    "CastLike": cast_like,
    "Concat": concat,
    "Constant": constant,
    "ConstantOfShape": constant_of_shape,
    "DepthToSpace": blocks(functions.depth_to_space),
    "Expand": expand,
    "Flatten": flatten,
    "Gather": gather,
    "GatherElements": gather_elements,
    "Identity": identity,
    "Pad": pad,
    "Reshape": reshape,
    "Shape": shape,
    "Size": lambda op: op.call(functions.size_of, op.input(0), moves=True),
    "Slice": slice_,
    "SpaceToDepth": blocks(functions.space_to_depth),
    "Split": split,
    "Squeeze": squeeze,
    "Tile": tile,
    "Transpose": transpose,
    "Trilu": trilu,
    "Unsqueeze": unsqueeze,
}
