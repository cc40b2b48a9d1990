"""ONNX's recurrent operators: RNN, GRU and LSTM.

As torch's own layers where these do the same, else step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from .builder import Handler, Operation
from .functions import hard_sigmoid
from .values import Constant, Dynamic, Operand

Activation: TypeAlias = "Callable[[Tensor], Tensor]"

_ORDER = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 2, 3, 1)}
"""Where torch's gates are among ONNX's: r z n of z r h, i f g o of i o f c."""

_LAYERS: dict[str, Callable[..., nn.RNNBase]] = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}

_DEFAULTS = {
    "RNN": ("tanh",),
    "GRU": ("sigmoid", "tanh"),
    "LSTM": ("sigmoid", "tanh", "tanh"),
}

_ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], tuple[float, ...]]] = {
    "affine": (lambda x, alpha, beta: alpha * x + beta, (1.0, 0.0)),
    "elu": (functional.elu, (1.0,)),
    "hardsigmoid": (hard_sigmoid, (0.2, 0.5)),
    "leakyrelu": (functional.leaky_relu, (0.01,)),
    "relu": (torch.relu, ()),
    "scaledtanh": (lambda x, alpha, beta: alpha * torch.tanh(beta * x), (1.0, 1.0)),
    "sigmoid": (torch.sigmoid, ()),
    "softplus": (functional.softplus, ()),
    "softsign": (functional.softsign, ()),
    "tanh": (torch.tanh, ()),
    "thresholdedrelu": (lambda x, alpha: torch.where(x > alpha, x, 0.0), (1.0,)),
}
"""Each with what its alpha, and its beta, are by default."""


Activations: TypeAlias = "list[tuple[tuple[str, tuple[float, ...]], ...]]"
"""For each direction their names, each with its alpha and beta as far as it has them."""


# The modules: both take ``[time, batch, input]`` and give ``[time, directions, batch, hidden]``,
# with the last states ``[directions, batch, hidden]`` ------------------------------------------


class _Recurrent(nn.Module):
    """What both have in common.

    Args:
        given: what it is called with besides x, in order: "h" and "c", the states at the
            beginning ``[directions, batch or 1, hidden]``, and others.
        backwards: for each direction whether it goes from the end to the beginning.
        batch_first: the batch is the first dimension of all that has one (`layout` 1).
    """

    def __init__(
        self, kind: str, given: Sequence[str], backwards: Sequence[bool], batch_first: bool
    ) -> None:
        super().__init__()
        self.kind, self.given = kind, tuple(given)
        self.backwards, self.batch_first = tuple(backwards), batch_first

    def forward(self, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        # What is made of sizes is on the CPU.
        named = {name: t.to(x.device) for name, t in zip(self.given, given, strict=True)}
        if self.batch_first:
            x = x.transpose(0, 1)
            named |= {k: t.transpose(0, 1) for k, t in named.items() if k in ("h", "c")}
        for name in ("h", "c"):
            if name in named:
                directions, _, hidden = named[name].shape
                named[name] = named[name].expand(directions, x.shape[1], hidden)
        y, *last = self.states(x, named)
        if self.batch_first:
            return y.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in last)
        return y, *last

    def states(self, x: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """All hidden states, the last ones and, of an LSTM, the last of its cells."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return (
            f"{self.kind}, given={self.given}, backwards={self.backwards}, "
            f"batch_first={self.batch_first}"
        )


class Recurrent(_Recurrent):
    """One of torch's recurrent layers. Its weights are set from outside."""

    def __init__(self, inner: nn.RNNBase, *common: Any) -> None:
        super().__init__(*common)
        self.inner = inner

    def states(self, x: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        # What goes back alone is torch's forward of the reversed sequence.
        alone = self.backwards == (True,)
        time, batch, _ = x.shape
        y, last = self.inner(x.flip(0) if alone else x, self._before(given))
        y = y.reshape(time, batch, len(self.backwards), -1).transpose(1, 2)
        return y.flip(0) if alone else y, *(last if isinstance(last, tuple) else (last,))

    def _before(self, given: Mapping[str, Tensor]) -> Any:
        """The states at the beginning, as torch takes them."""
        own = {name: given[name].contiguous() for name in ("h", "c") if name in given}
        if not own:
            return None
        if self.kind != "LSTM":
            return own["h"]
        zeros = torch.zeros_like(next(iter(own.values())))
        return own.get("h", zeros), own.get("c", zeros)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, inner={self.inner!r}"


class RecurrentSteps(_Recurrent):
    """Any of the three step by step, with all that ONNX has (operators LSTM, GRU, RNN).

    `given` has "w" ``[directions, gates * hidden, input]`` and "r" ``[…, hidden]``, and may have
    the biases of both, "b" ``[directions, 2 * gates * hidden]``, an LSTM's peepholes "p"
    ``[directions, 3 * hidden]``, and "lengths" ``[batch]`` of sequences that end before the others.

    Args:
        activations: for each direction.
        clip: the largest amount of what goes into an activation; None: there is none.
        before_reset: a GRU's products with the state come before it is reset.
        input_forget: an LSTM's forget gate is what its input gate leaves.
    """

    def __init__(
        self,
        *common: Any,
        activations: Activations,
        clip: float | None = None,
        before_reset: bool = False,
        input_forget: bool = False,
    ) -> None:
        super().__init__(*common)
        self.activations = tuple(map(tuple, activations))
        self.clip, self.before_reset, self.input_forget = clip, before_reset, input_forget

    def states(self, x: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        each = [self._direction(d, x, given) for d in range(len(self.backwards))]
        y = torch.stack([states for states, _ in each], 1)
        last = zip(*(ends for _, ends in each), strict=True)
        return y, *(torch.stack(states) for states in last)

    def _direction(
        self, d: int, x: Tensor, given: Mapping[str, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        own = {name: t[d] for name, t in given.items() if name != "lengths"}
        lengths = given.get("lengths")
        bias = own["b"].chunk(2) if "b" in own else (None, None)
        entering = functional.linear(x, own["w"], bias[0])
        zeros = x.new_zeros(x.shape[1], own["r"].shape[-1])
        states = tuple(own.get(k, zeros) for k in ("h", "c")[: 2 if self.kind == "LSTM" else 1])
        times = range(len(x))
        made: list[Tensor] = []
        for time in reversed(times) if self.backwards[d] else times:
            after = self._step(d, entering[time], states, own["r"], bias[1], own.get("p"))
            y = after[0]
            if lengths is not None:
                # A sequence that is over keeps its states, and gives zeros.
                there = (time < lengths)[:, None]
                y = torch.where(there, y, 0.0)
                after = tuple(
                    torch.where(there, new, old) for new, old in zip(after, states, strict=True)
                )
            states = after
            made.append(y)
        if self.backwards[d]:
            made.reverse()
        return torch.stack(made), states

    def _step(
        self,
        d: int,
        entering: Tensor,
        states: tuple[Tensor, ...],
        r: Tensor,
        bias: Tensor | None,
        peepholes: Tensor | None,
    ) -> tuple[Tensor, ...]:
        act = [self._activation(*activation) for activation in self.activations[d]]
        h = states[0]
        if self.kind == "RNN":
            return (act[0](entering + functional.linear(h, r, bias)),)
        if self.kind == "GRU":
            biases = (None, None, None) if bias is None else bias.chunk(3)
            pairs = zip(r.chunk(3), biases, strict=True)
            through = [partial(functional.linear, weight=w, bias=b) for w, b in pairs]
            z, reset, new = entering.chunk(3, -1)
            z = act[0](z + through[0](h))
            reset = act[0](reset + through[1](h))
            if self.before_reset:
                new = act[1](new + reset * through[2](h))
            else:
                new = act[1](new + through[2](reset * h))
            return ((1 - z) * new + z * h,)
        c = states[1]
        i, o, f, new = (entering + functional.linear(h, r, bias)).chunk(4, -1)
        p_i, p_o, p_f = (None, None, None) if peepholes is None else peepholes.chunk(3)
        i = act[0](_seeing(i, p_i, c))
        f = 1 - i if self.input_forget else act[0](_seeing(f, p_f, c))
        c = f * c + i * act[1](new)
        return act[0](_seeing(o, p_o, c)) * act[2](c), c

    def _activation(self, name: str, settings: tuple[float, ...]) -> Activation:
        function = _ACTIVATIONS[name][0]
        if self.clip is None:
            return lambda x: function(x, *settings)
        return lambda x: function(x.clamp(-self.clip, self.clip), *settings)  # type: ignore[operator]

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, activations={self.activations}, clip={self.clip}, "
            f"before_reset={self.before_reset}, input_forget={self.input_forget}"
        )


def _seeing(gate: Tensor, peephole: Tensor | None, cells: Tensor) -> Tensor:
    return gate if peephole is None else gate + peephole * cells


# The handlers -----------------------------------------------------------------------------------


def recurrent(kind: str) -> Handler:
    """An RNN, a GRU or an LSTM. Its results: all states, the last and, of an LSTM, its cells."""

    def handle(op: Operation) -> tuple[Operand, ...]:
        op.ignore("hidden_size", "output_sequence")  # as the weights have it; before opset 7
        batch_first = bool(op.attribute("layout", 0))
        direction = op.attribute("direction", "forward")
        if direction not in ("forward", "reverse", "bidirectional"):
            raise op.fail(f"its direction is {direction!r}, which isn't known")
        backwards = (direction == "reverse",) if direction != "bidirectional" else (False, True)
        activations = _activations(op, kind, len(backwards))
        before_reset = kind == "GRU" and bool(op.attribute("linear_before_reset", 0))
        input_forget = kind == "LSTM" and bool(op.attribute("input_forget", 0))
        clip = op.attribute("clip")
        weights = {name: op.optional(k) for k, name in ((1, "w"), (2, "r"), (3, "b"), (7, "p"))}
        if op.shape(1)[0] != len(backwards):
            raise op.fail(
                f"its weights are of {op.shape(1)[0]} directions, it has {len(backwards)}"
            )
        others = {
            "lengths": _lengths(op, batch_first),
            "h": _state(op, 5, batch_first),
            "c": _state(op, 6, batch_first),
        }
        given = {name: operand for name, operand in others.items() if operand is not None}
        own = [weights[name] for name in ("w", "r", "b") if weights[name] is not None]
        plain = (
            all(isinstance(x, Constant) and not x.shared for x in own)
            and clip is None
            and not input_forget
            and (kind != "GRU" or before_reset)
            and weights["p"] is None
            and "lengths" not in given
            and _torchs(kind, activations)
        )
        if plain:
            layer = _layer(kind, [x for x in own if isinstance(x, Constant)], activations)
            module: nn.Module = Recurrent(layer, kind, list(given), backwards, batch_first)
        else:
            given |= {name: operand for name, operand in weights.items() if operand is not None}
            module = RecurrentSteps(
                kind,
                list(given),
                backwards,
                batch_first,
                activations=activations,
                clip=clip,
                before_reset=before_reset,
                input_forget=input_forget,
            )
        found: Any = op.module(module, op.input(0), *given.values())
        return tuple(found)

    return handle


def _activations(op: Operation, kind: str, directions: int) -> Activations:
    count = len(_DEFAULTS[kind])
    names = op.attribute("activations") or _DEFAULTS[kind] * directions
    if len(names) != count * directions:
        raise op.fail(f"has {len(names)} activations; {count} for each direction are needed")
    # Each takes the next ones, if it has some.
    given = [iter(op.attribute(f"activation_{what}") or ()) for what in ("alpha", "beta")]
    found = []
    for name in names:
        if name.lower() not in _ACTIVATIONS:
            raise op.fail(f"its activation {name!r} isn't known")
        usual = _ACTIVATIONS[name.lower()][1]
        settings = tuple(next(x, value) for x, value in zip(given, usual, strict=False))
        found.append((name.lower(), settings))
    return [tuple(found[d * count : (d + 1) * count]) for d in range(directions)]


def _torchs(kind: str, activations: Activations) -> bool:
    """Whether they are those of torch's layer."""
    names = {tuple(name for name, _ in each) for each in activations}
    return names == {_DEFAULTS[kind]} or (kind == "RNN" and names == {("relu",)})


def _layer(kind: str, weights: Sequence[Constant], activations: Activations) -> nn.RNNBase:
    """torch's layer with these weights: w, r and, where it has biases, b (`RecurrentSteps`)."""
    w, r, *biases = weights
    directions, _, inputs = w.tensor.shape
    more = {"nonlinearity": activations[0][0][0]} if kind == "RNN" else {}
    layer = _LAYERS[kind](
        inputs,
        r.tensor.shape[-1],
        bias=bool(biases),
        bidirectional=directions == 2,
        device="meta",
        **more,
    )
    for d in range(directions):
        parts = [("weight_ih", w, w.tensor[d]), ("weight_hh", r, r.tensor[d])]
        for b in biases:
            halves = b.tensor[d].chunk(2)
            parts += [("bias_ih", b, halves[0]), ("bias_hh", b, halves[1])]
        for name, constant, part in parts:
            gates = part.chunk(len(_ORDER[kind]))
            ordered = torch.cat([gates[k] for k in _ORDER[kind]])
            p = nn.Parameter(ordered, requires_grad=constant.trainable)
            setattr(layer, f"{name}_l0{'_reverse' if d else ''}", p)
    return layer


def _numbers(operand: Operand) -> tuple[Tensor, ...]:
    """Those that are known before the model runs, for each of two batch sizes; else none."""
    if isinstance(operand, Constant):
        return (operand.tensor,)
    return operand.probes if operand.host else ()


def _lengths(op: Operation, batch_first: bool) -> Operand | None:
    """The sequences' lengths; None: they are all as long."""
    found = op.optional(4)
    if found is None:
        return None
    known, time = _numbers(found), op.shape()[1 if batch_first else 0]
    if known and all(bool((numbers == time).all()) for numbers in known):
        return None
    return _of_all(op, found, 0, "sequence_lens")


def _state(op: Operation, k: int, batch_first: bool) -> Operand | None:
    """The states at the beginning; None: zeros."""
    found = op.optional(k)
    if found is None:
        return None
    known = _numbers(found)
    if known and not any(bool(numbers.any()) for numbers in known):
        return None
    return _of_all(op, found, 0 if batch_first else 1, f"initial_{'hc'[k - 5]}")


def _of_all(op: Operation, found: Operand, dim: int, what: str) -> Operand:
    """One for all samples, where the file has numbers for those of its own batch."""
    if isinstance(found, Dynamic):
        return found
    one = found.tensor.narrow(dim, 0, 1)
    if not bool((found.tensor == one).all()):
        raise op.fail(f"its {what} differ between the samples of the file's batch")
    return Constant(one.clone(), found.trainable, found.shared, found.name)


RECURRENT: dict[str, Handler] = {kind: recurrent(kind) for kind in _LAYERS}
