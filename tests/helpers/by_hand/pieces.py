"""Running a cut model by hand, the way the stages will."""

from __future__ import annotations

import torch
from helpers.models.any import flat
from timeprest.profiles.autograd.boundary import Inlet
from timeprest.profiles.autograd.split_backward import SplitBackward
from timeprest.profiles.tracing.pieces import cut, decode, encode, take_apart
from timeprest.profiles.tracing.shapes import specs_and_result
from torch import nn
from torch.autograd.graph import get_gradient_edge


def run_pieces(traced, groups, inputs, seed, fake=True, leaves=flat, split=False):
    """Forward and backward piece by piece, each in a graph of its own; as the stages will.

    `split`: backwards in two parts, all the second ones after all the first.
    """
    specs, _ = specs_and_result(traced, inputs, fake=fake)
    pieces = cut(traced, groups)
    known = dict(zip((node.name for node in traced.inputs), inputs, strict=True))
    entries, outputs = [], []
    torch.manual_seed(seed)
    for piece in pieces:
        inlets, arguments = {}, []
        for name in piece.inputs:
            value = known[name]
            spec = specs.get(name)
            if spec is not None and spec.needs_grad:
                inlets[name] = Inlet()
                # A copy, as after a transfer.
                value = inlets[name].admit(value.clone())
            elif spec is not None:
                value = decode(value, spec.kind)
            arguments.append(value)
        out = piece.module(*arguments)
        for name, value in zip(piece.outputs, out, strict=False):
            known[name] = encode(value, name).detach()
            assert tuple(known[name].shape) == specs[name].shape
            assert known[name].dtype == specs[name].dtype
        entries.append(inlets)
        outputs.append(out)
    result = outputs[-1][-1]
    grads, halves = {}, []
    loss = sum(t.square().sum() for t in leaves(result))
    for piece, inlets, out in reversed(list(zip(pieces, entries, outputs, strict=True))):
        roots = [(loss, None)] if piece.has_result else []
        for name, value in zip(piece.outputs, out, strict=False):
            if name in grads:
                roots.append((value, grads.pop(name)))
        if split:
            halves.append(split_backward(piece, roots, inlets.values()))
        elif roots:
            torch.autograd.backward([r for r, _ in roots], [g for _, g in roots])
        for name, inlet in inlets.items():
            if inlet.grad is not None:
                grads[name] = grads[name] + inlet.grad if name in grads else inlet.grad
    for half in halves:
        half.weights()
        assert not half.held_bytes
    return result, loss


def split_backward(piece, roots, inlets):
    """The first part of a piece's backward done."""
    half = SplitBackward(
        [get_gradient_edge(root) for root, _ in roots],
        [torch.ones_like(root) if grad is None else grad for root, grad in roots],
        inlets,
        piece.module.parameters(),
    )
    half.inputs()
    return half


def leaves_of(value):
    return [t for t in take_apart(value)[0] if isinstance(t, torch.Tensor)]


def without_chance(model):
    """Pieces may run in another order than the whole: random numbers would be drawn in it too."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        for name in ("dropout", "attention_dropout", "dropout_p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def assert_learnt_alike(model, whole):
    """The same gradients and buffers in both."""
    gradients = {n: p.grad for n, p in whole.named_parameters()}
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[n], rtol=1e-10, atol=1e-10)
    for (n, got), (_, want) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        torch.testing.assert_close(got, want, msg=n)
