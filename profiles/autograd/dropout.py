"""Training without dropout, or with the statistics that batch norms have; whether a model has
dropout, batch norms or other random numbers.

A torch function mode sees every operation that a model's Python code calls, whether the model is
the user's own, a piece cut from it, or a graph that torch.export made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_RECURRENT = ("gru", "lstm", "rnn_tanh", "rnn_relu")
_TRAINING = 5
"""Position of `training` in all batch norms."""

_OF_FUNCTION = (
    *("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
)
_OF_OPERATION = (
    *("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
    "cudnn_enabled",
)
BATCH_NORMS: Mapping[Any, tuple[str, ...]] = {
    functional.batch_norm: _OF_FUNCTION,
    torch.batch_norm: _OF_OPERATION,
    # Graphs of torch.export call this one.
    torch.ops.aten.batch_norm.default: _OF_OPERATION,
}
"""What calls a batch norm, and the names of its arguments."""


@dataclass
class Traits:
    """What was seen of a model while it trained.

    Attributes:
        drops: it drops something out.
        mixes: a layer mixes the samples of a micro-batch (batch norm).
        random: it draws random numbers besides dropout.
        loss_random: the loss does.
        loss_hides: it draws by NumPy's or Python's own generators.
        step_random: the optimizer's steps draw random numbers.
    """

    drops: bool = False
    mixes: bool = False
    random: bool = False
    loss_random: bool = False
    loss_hides: bool = False
    step_random: bool = False


class _InBackwards(TorchFunctionMode):
    """A mode that is on within backwards too, where checkpoints compute again.

    Torch takes a mode off while it calls what the mode has seen, a whole backward as well.
    """

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func not in (Tensor.backward, torch.autograd.backward):
            return func(*args, **kwargs)
        found = dict(zip(_BACKWARD, args, strict=False)) | dict(kwargs)
        roots = _as_tuple(found["tensors"])
        given = found.get("gradient", found.get("grad_tensors"))
        grads = (None,) * len(roots) if given is None else _as_tuple(given)
        create = bool(found.get("create_graph"))
        retain, inputs = found.get("retain_graph"), found.get("inputs")
        if isinstance(inputs, Mapping):
            inputs = tuple(inputs.values())
        made = torch.autograd._make_grads(roots, grads, is_grads_batched=False)
        with self:
            return _engine_run_backward(
                *(roots, made, create if retain is None else retain, create),
                () if inputs is None else _as_tuple(inputs),
                allow_unreachable=True,
                accumulate_grad=True,
            )


_BACKWARD = ("tensors", "grad_tensors", "retain_graph", "create_graph")
"""Arguments of both backwards by position; the gradients are called otherwise in a tensor's."""


def _as_tuple(found: Any) -> tuple[Any, ...]:
    return (found,) if isinstance(found, Tensor | GradientEdge) else tuple(found)


class WithoutDropout(_InBackwards):
    """Runs every dropout with probability 0, and notes what it sees in `traits`."""

    def __init__(self, traits: Traits | None = None) -> None:
        super().__init__()
        self.traits = traits or Traits()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, its dropout probability replaced by 0."""
        # An operation of a graph that was exported has its overload behind a dot.
        name = getattr(func, "__name__", "").split(".")[0]
        given = dict(kwargs or {})
        if "dropout" in name:
            args = self._replace(args, given, 1, "p")
        elif name == "scaled_dot_product_attention":
            args = self._replace(args, given, 4, "dropout_p", default=0.0)
        elif name == "multi_head_attention_forward":
            args = self._replace(args, given, 10, "dropout_p")
        elif name in _RECURRENT:
            # The only float among its arguments, in each of its two forms; `train` is the next.
            for k, found in enumerate(args):
                if isinstance(found, float):
                    self.traits.drops |= found > 0 and bool(args[k + 1])
            args = tuple(0.0 if isinstance(a, float) else a for a in args)
        elif "batch_norm" in name:
            training = args[_TRAINING] if len(args) > _TRAINING else given.get("training", False)
            self.traits.mixes |= bool(training)
        return self._call(func, args, given)

    def _replace(
        self,
        args: tuple[Any, ...],
        given: dict[str, Any],
        position: int,
        name: str,
        default: float = 0.5,
    ) -> tuple[Any, ...]:
        """Arguments with 0 for the probability, wherever it stands."""
        if len(args) > position:
            found = args[position]
            args = (*args[:position], 0.0, *args[position + 1 :])
        else:
            found = given.get(name, default)
            given[name] = 0.0
        third = args[2] if len(args) > 2 and isinstance(args[2], bool) else True
        trains = bool(given.get("training", given.get("train", third)))
        self.traits.drops |= trains and found > 0
        return args


class HeldStatistics(_InBackwards):
    """Batch norms normalize each sample by the running statistics that they have (by mean 0 and
    variance 1 where they have none), and leave them as they are: no sample has a part in another's
    result."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, in evaluation mode if it is a batch norm."""
        given = dict(kwargs or {})
        names = BATCH_NORMS.get(func)
        if names is None:
            return self._call(func, args, given)
        given |= dict(zip(names, args, strict=False))
        x = given.pop("input")
        channels = x.shape[1]
        for name, number in (("running_mean", 0.0), ("running_var", 1.0)):
            if given.get(name) is None:
                given[name] = torch.full((channels,), number, dtype=x.dtype, device=x.device)
        given["training"] = False
        return func(x, **given)
