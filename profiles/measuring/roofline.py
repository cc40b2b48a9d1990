"""Times computed instead of measured: the roofline of a device's data sheet.

Every operation takes the longer of its arithmetic at the device's peak and its memory traffic at
the device's bandwidth (Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009), and a
launch. It needs shapes only, so models run under it on fake tensors, without memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..device_specs import DeviceSpec
from ..tracing.fake import know_grouped_products
from ..tracing.pieces import tensors_in

# What an operation of ATen costs: floating-point operations, and bytes from and to memory -------
# Arithmetic is counted for matrix products, convolutions, attention and recurrent layers, by the
# formulas of torch.utils.flop_counter; causal attention counts in full, as it does there. All else
# is bound by memory, and its arithmetic isn't counted.
#
# Traffic is each input read once and each output written once: caches never help across
# operations and always suffice within one. Views move nothing; of a table that rows are taken
# from, the rows count.

aten = torch.ops.aten


@dataclass(frozen=True)
class Rule:
    """What is known of an operation from its name and schema alone."""

    free: bool
    """Touches no memory: views, queries, new uninitialized memory."""
    composite: bool = False
    """Made of other operations, which are to be counted in its place."""
    flops: Callable[..., int] | None = None
    """Formula, called with the arguments and the result as `out_val`; None: bound by memory."""
    cudnn: bool = False
    """A convolution or recurrent layer, which cuDNN does on a CUDA device."""
    unread: frozenset[int | str] = frozenset()
    """Arguments, by position or name, whose values aren't needed."""
    written: frozenset[int | str] = frozenset()
    """Arguments changed in place."""
    fresh: tuple[bool, ...] = ()
    """Of each result, whether it is new memory."""
    first: Callable[[tuple[Any, ...], Any], int] | None = None
    """Bytes of the first argument that are moved, where only some rows of it are."""


_FREE = {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "lift", "record_stream"}
_FREE_PREFIXES = ("empty", "new_empty", "sym_", "is_", "_assert")
_OVERWRITE = {
    *("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"),
    *("log_normal_", "cauchy_", "geometric_"),
}
_UNREAD = {
    # These backwards want only the shape of the forward's input.
    "nll_loss_backward": 1,
    "nll_loss2d_backward": 1,
    "max_pool2d_with_indices_backward": 1,
    "max_pool3d_with_indices_backward": 1,
    "avg_pool2d_backward": 1,
    "_adaptive_avg_pool2d_backward": 1,
}


@cache
def rule_of(func: Any) -> Rule:
    """The rule of an operation (an OpOverload)."""
    if func.namespace == "prim":
        return Rule(free=True)
    schema = func._schema
    space, _, name = schema.name.partition("::")
    places: list[int | str] = [
        argument.name if argument.kwarg_only else k for k, argument in enumerate(schema.arguments)
    ]
    named = dict(zip(places, schema.arguments, strict=True))
    written = {k for k, a in named.items() if a.alias_info is not None and a.alias_info.is_write}
    # What is written by name is an out=, and its old values don't matter.
    unread: set[int | str] = {k for k in written if isinstance(k, str)}
    if name in _OVERWRITE or name.endswith("_like") or name.startswith("new_"):
        unread.add(0)
    if name in _UNREAD:
        unread.add(_UNREAD[name])
    first = _FIRST.get(name) if space == "aten" else None
    return Rule(
        free=func.is_view
        or torch.Tag.inplace_view in func.tags
        or (space == "aten" and (name in _FREE or name.startswith(_FREE_PREFIXES))),
        composite=torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ),
        flops=_FLOPS.get(func.overloadpacket) or flop_registry.get(func.overloadpacket),
        cudnn="conv" in name or "rnn" in name,
        unread=frozenset(unread | ({0} if first else set())),
        written=frozenset(written - ({0} if first else set())),
        fresh=tuple(value.alias_info is None for value in schema.returns),
        first=first,
    )


# Memory traffic ------------------------------------------------------------------------------


def moved_bytes(rule: Rule, args: tuple[Any, ...], kwargs: Any, result: Any) -> int:
    """Bytes that an operation reads and writes."""
    read: list[Tensor] = []
    moved = 0
    for place, value in (*enumerate(args), *kwargs.items()):
        found = tensors_in(value)
        if place not in rule.unread:
            read += found
        if place in rule.written:
            moved += sum(map(_extent, found))
    moved += _distinct(read)
    results = result if len(rule.fresh) > 1 else (result,)
    for value, fresh in zip(results, rule.fresh, strict=False):
        if fresh:
            moved += sum(map(_extent, tensors_in(value)))
    if rule.first is not None:
        moved += rule.first(args, result)
    return moved


def _extent(tensor: Tensor) -> int:
    """Bytes of a tensor's own elements: repeated ones and overlapping windows count once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    elements = span = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if not size:
            return 0
        if stride:
            elements *= size
            span += (size - 1) * stride
    return min(elements, span) * tensor.element_size()


def _distinct(tensors: list[Tensor]) -> int:
    """Bytes of several tensors, some of which may be the same memory."""
    if len(tensors) < 2:
        return _extent(tensors[0]) if tensors else 0
    whole: dict[int, int] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        size = _extent(tensor)
        key = id(tensor)
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            key = storage._cdata
            size = min(size + whole.get(key, 0), storage.nbytes())
        whole[key] = size
    return sum(whole.values())


def _rows(args: tuple[Any, ...], result: Any) -> int:
    """Of a table that rows are taken from: as much as comes out, but no more than all of it."""
    return min(_extent(args[0]), _extent(result))


def _elements(
    count: Callable[[tuple[Any, ...]], int], times: int = 1
) -> Callable[[tuple[Any, ...], Any], int]:
    """So many elements of the first argument, but no more than all, `times` over."""

    def size(args: tuple[Any, ...], result: Any) -> int:
        return times * min(_extent(args[0]), count(args) * int(args[0].element_size()))

    return size


def _bags(args: tuple[Any, ...]) -> int:
    """A row of the table for each index."""
    table, indices = args[:2]
    return int(indices.numel() * (table.numel() // max(table.shape[0], 1)))


def _put(args: tuple[Any, ...], result: Any) -> int:
    """Where values are put: written, and read if they are added. A mask may mean all places."""
    table, indices = args[:2]
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        count = table.numel()
    else:
        whole = (n for k, n in enumerate(table.shape) if k >= len(indices) or indices[k] is None)
        count = prod(torch.broadcast_shapes(*(index.shape for index in given))) * prod(whole)
    accumulate = len(args) > 3 and args[3]
    return _elements(lambda _: count, 2 if accumulate else 1)(args, result)


_FIRST: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    "embedding": _rows,
    "gather": _rows,
    "index": _rows,
    "index_select": _rows,
    "take": _rows,
    "_unsafe_index": _rows,
    "_embedding_bag": _elements(_bags),
    "_embedding_bag_forward_only": _elements(_bags),
    "nll_loss_forward": _elements(lambda args: int(args[1].numel())),
    "nll_loss2d_forward": _elements(lambda args: int(args[1].numel())),
    "index_put_": _put,
    "_index_put_impl_": _put,
    "index_add_": _elements(lambda args: int(args[3].numel()), 2),
    "index_copy_": _elements(lambda args: int(args[3].numel())),
    "scatter_": _elements(lambda args: int(args[2].numel())),
    "scatter_add_": _elements(lambda args: int(args[2].numel()), 2),
}


# Formulas that torch lacks -------------------------------------------------------------------


def _convolution_backward(grad: Tensor, input: Tensor, weight: Tensor, *args: Any, **_: Any) -> int:
    """As many as forward for each gradient asked for: the input's, the weight's.

    torch's formula leaves the groups out of the weight's gradient.
    """
    transposed, mask = args[4], args[7]
    places = prod((input if transposed else grad).shape[2:])
    return 2 * input.shape[0] * places * weight.numel() * (bool(mask[0]) + bool(mask[1]))


def _recurrent(input: Tensor, of_input: Tensor, of_hidden: Tensor, *_: Any, **__: Any) -> int:
    """One direction of one recurrent layer: input ``[steps, batch, width]``, all gates' weights."""
    return 2 * input.numel() // input.shape[-1] * (of_input.numel() + of_hidden.numel())


def _matrix_vector(*args: Any, **_: Any) -> int:
    """Two for every element of the matrix; for a dot product, of the vector."""
    return 2 * int(max(value.numel() for value in args if isinstance(value, Tensor)))


_attention = flop_registry[aten._scaled_dot_product_flash_attention]
_attention_backward = flop_registry[aten._scaled_dot_product_flash_attention_backward]
_FLOPS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.convolution_backward: _convolution_backward,
    aten.mkldnn_rnn_layer: _recurrent,
    # As for any matrix product: once for the input's gradient, once for the weights'.
    aten.mkldnn_rnn_layer_backward: lambda *given, **more: 2 * _recurrent(*given, **more),
    **dict.fromkeys((aten.mv, aten.addmv, aten.dot, aten.vdot), _matrix_vector),
}


# The time of all operations ---------------------------------------------------------------------


class Roofline(TorchDispatchMode):
    """Dispatch mode that adds up what the operations under it would take on a device.

    It sees a backward as well as a forward. With fake tensors, enter it inside the
    FakeTensorMode; the other way round, that mode's cache would hide operations from it.

    float32 matrix products and convolutions go at the peak of TF32 where the spec says so, or
    where torch's own flags (read when the clock is made) would let them on a CUDA device: by
    default for cuDNN's convolutions and recurrent layers, not for matrix products.

    Attributes:
        seconds: on the device so far.
        flops: floating-point operations so far; a multiply-add is two.
        bytes: moved from and to memory so far.
        operations: kernels launched so far.
    """

    def __init__(self, spec: DeviceSpec) -> None:
        super().__init__()
        self.spec = spec
        self.seconds = 0.0
        self.flops = 0
        self.bytes = 0
        self.operations = 0
        know_grouped_products()
        self._bandwidth = spec.memory_bandwidth_bytes_per_s * spec.memory_efficiency
        self._peaks = {cudnn: _peaks(spec, cudnn) for cudnn in (False, True)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = rule_of(func)
        if rule.composite:
            # In inference mode, these arrive whole.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not rule.free:
            self._add(rule, args, kwargs, result)
        return result

    def _add(self, rule: Rule, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        moved = moved_bytes(rule, args, kwargs, result)
        seconds = moved / self._bandwidth
        if rule.flops is not None:
            flops = rule.flops(*args, **kwargs, out_val=result)
            peaks = self._peaks[rule.cudnn]
            peak = peaks.get(args[0].dtype, peaks[torch.float32])
            seconds = max(seconds, flops / peak)
            self.flops += flops
        self.seconds += seconds + self.spec.launch_s
        self.bytes += moved
        self.operations += 1


# Peaks ---------------------------------------------------------------------------------------


def _peaks(spec: DeviceSpec, cudnn: bool) -> dict[torch.dtype, float]:
    """Operations per second by dtype, of matrix products or of what cuDNN does."""
    peak, share = spec.peak_flops_per_s, spec.compute_efficiency
    single = peak.float32
    if peak.tf32 is not None and (spec.matmul == "tf32" or _allows_tf32(cudnn)):
        single = peak.tf32
    return {
        torch.float32: single * share,
        torch.float16: (peak.float16 or peak.float32) * share,
        torch.bfloat16: (peak.bfloat16 or peak.float32) * share,
    }


def _allows_tf32(cudnn: bool) -> bool:
    backend: Any = torch.backends.cudnn if cudnn else torch.backends.cuda.matmul
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:
        # Set through the newer fp32_precision, after which torch refuses to be asked as before.
        newer = backend.conv if cudnn else backend
        return bool(newer.fp32_precision == "tf32")
