"""Tensors without data, on which models run to find shapes and costs: torch's fake tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import flop_registry, register_flop_formula

Size: TypeAlias = Sequence[int]
_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def fake_mode() -> FakeTensorMode:
    """A mode that makes tensors without data, and takes real parameters and buffers among them."""
    know_grouped_products()
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the traceback that torch logs for each error on tensors without data; the error
    itself is raised, and what is said of it is one line."""
    before, _LOG.disabled = _LOG.disabled, True
    try:
        yield
    finally:
        _LOG.disabled = before


@contextmanager
def copied_without_data() -> Iterator[None]:
    """While it lasts, `copy.deepcopy` copies tensors without data as such: torch's own copies their
    mode and looks for their memory, which gives tensors of several modes, or fails."""

    def copied(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            copy: Any = tensor.detach().clone()
            if isinstance(tensor, nn.Parameter):
                copy = nn.Parameter(copy, tensor.requires_grad)
            memo[id(tensor)] = copy
        return memo[id(tensor)]

    kind: Any = FakeTensor
    kind.__deepcopy__ = copied
    try:
        yield
    finally:
        del kind.__deepcopy__


def know_grouped_products() -> None:
    """Have torch know what mixtures of experts multiply by: `torch.nn.functional.grouped_mm` in
    every dtype, where its kernels take float32 and its own rule for fake tensors bfloat16 alone;
    and how many operations that is, also where transformers has one of its own for torch.export."""
    from torch._subclasses.fake_impls import op_implementations_dict

    if (grouped := getattr(torch.ops.aten, "_grouped_mm", None)) is not None:
        op_implementations_dict.setdefault(grouped.default, _grouped_product)
    counted: dict[Any, Any] = {
        grouped: _grouped_flops,
        getattr(torch.ops.transformers, "grouped_mm_fallback", None): _grouped_flops,
        getattr(torch.ops.transformers, "grouped_mm_fallback_backward", None): _backward_flops,
    }
    for operation, flops in counted.items():
        if operation is not None and operation not in flop_registry:
            register_flop_formula(operation)(flops)


def _grouped_flops(a: Size, b: Size, *_: Any, out_shape: Size, **__: Any) -> int:
    """Of products of groups of rows with a matrix each; a multiply-add is two."""
    groups = out_shape[0] if len(a) == len(b) == 2 else 1
    return 2 * a[-1] * prod(out_shape) // groups


def _backward_flops(a: Size, b: Size, _: Any, out: Size, **__: Any) -> int:
    """As many again for the rows' gradient as for the matrices'."""
    return 2 * _grouped_flops(a, b, out_shape=out)


def _grouped_product(
    mode: FakeTensorMode,
    _: Any,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The result's shape: groups are of a's rows, of b's columns, or of what is summed over; with
    `offs` (G,) where one of them has no dimension of groups."""
    groups = () if offs is None else (offs.shape[0],)
    shape: tuple[int, ...] = (a.shape[-2], b.shape[-1])
    if a.dim() == b.dim():
        shape = (*(groups if a.dim() == 2 else (a.shape[0],)), *shape)
    with mode:
        return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)
