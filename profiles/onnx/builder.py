"""Building the torch.fx graph of an ONNX file: its values, names, constants and their folding.

Each new fx node is tried at once on tensors without data, for two batch sizes: this gives
every value's shape, which operators need to know, and shows what depends on the batch.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from ..errors import TargetError, one_line
from ..tracing.fake import fake_mode, quiet
from .file import OnnxFile, OnnxInput, OnnxNode
from .functions import beside
from .values import (
    BatchAxis,
    Constant,
    Dynamic,
    Operand,
    Setting,
    find_batch,
    map_operands,
    operands_in,
)

PROBE_BATCH, OTHER_PROBE_BATCH = 11, 13
"""The second batch size each node is tried with (the other where the file's is the first)."""

_LITERAL_LIMIT = 64
"""Elements; larger constants in shape arithmetic are buffers."""
_NO_WEIGHT = 1e30
"""Constants this large are masks, not something to train."""
_MADE = re.compile(r"val_\d+")
"""What torch.onnx calls constants that it makes, by torch.export; a parameter has its own name, but
for weights that are folded, such as a transposed one. One number is a factor, as of attention."""


class GraphBuilder:
    """The graph under construction.

    Attributes:
        batch: the batch size in the file, 1 where it is free.
        fixed: whether the file fixes it.
        values: what the ONNX names stand for; at first the inputs and the constants.
        weights: names of what `Constant` nodes make that may be trained.
    """

    def __init__(self, file: OnnxFile, weights: Collection[str] = ()) -> None:
        self.weights = weights
        self.file, self.batch, self.fixed = file, file.batch or 1, file.batch is not None
        batch = self.batch
        probe = PROBE_BATCH if batch != PROBE_BATCH else OTHER_PROBE_BATCH
        self.batches = (batch, probe)
        self.values: dict[str, Operand] = {}
        self.uses = Counter(name for node in file.nodes for name in node.inputs)
        self.uses.update(file.outputs)
        self._root = nn.Module()
        self._graph = fx.Graph()
        self._mode = fake_mode()
        self._taken = {*dir(fx.GraphModule(nn.Module(), fx.Graph()))}
        self._attributes: dict[int, str] = {}
        self._origin: OnnxNode | None = None
        for x in file.inputs:
            self._add_input(x)
        for name, tensor in file.initializers.items():
            made = tensor.shape == (1,) and _MADE.fullmatch(name)
            self.values[name] = self.constant(name, tensor, trainable=not made)

    def _add_input(self, x: OnnxInput) -> None:
        name = identifier(x.name)
        node = self._graph.create_node("placeholder", name, name=name)
        # The target is written as an argument of the forward: it mustn't be a keyword, hide torch
        # or be another input's ("x.1" beside "x_1"), which fx sees to for the names of nodes alone.
        node.target = node.name
        with self._mode:
            small, large = (torch.empty((m, *x.shape), dtype=x.dtype) for m in self.batches)
        self.values[x.name] = Dynamic(node, (small, large), BatchAxis(0))

    def constant(self, name: str, tensor: Tensor, trainable: bool) -> Constant:
        """A constant under an ONNX name; only float tensors with dimensions can be trained."""
        return Constant(tensor, trainable and can_train(tensor), self.uses[name] > 1, name)

    def operand(self, name: str) -> Operand:
        """What an operator takes by an ONNX name.

        Exporters write tensors with the same numbers once: norms of a new model aren't tied for
        having ones and zeros all.
        """
        found = self.values[name]
        if isinstance(found, Constant) and found.trainable and self.uses[name] > 1:
            numbers = found.tensor
            if bool((numbers == numbers.flatten()[0]).all()):
                return Constant(numbers.clone(), True, False, found.name)
        return found

    def add(self, node: OnnxNode, handler: Handler) -> None:
        """Import the next ONNX node. Raises TargetError where it can't be imported."""
        # All fx nodes from here on belong to it.
        self._origin = node
        operation = Operation(node, self)
        try:
            results = handler(operation)
        except TargetError:
            raise
        except Exception as error:  # a broken node: attributes missing or of another kind
            reason = " ".join(str(error).split())[:200]
            raise self.fail(f"can't be imported: {type(error).__name__}: {reason}") from error
        operation.finish(results)

    def fail(self, reason: str) -> TargetError:
        """An error about the ONNX node at hand."""
        node = self._origin
        if node is None:
            return TargetError(f"{self.file.path}: {reason}")
        return TargetError(f"{self.file.path}: node {node.name!r} is a {node.op_type!r}: {reason}")

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        moves: bool = False,
        reshapes: bool = False,
        batch: BatchAxis | None = None,
    ) -> Any:
        """A call of `function`, folded to a constant where its arguments are constants.

        Args:
            args: operands, settings (plain or Setting), or nests of them.
            moves: it only moves elements about, so that shape arithmetic that comes out the
                same for both batch sizes doesn't depend on the batch and is folded too.
            reshapes: its result has each element once, so that folding it into a parameter
                that nothing else uses leaves the same model to train.
            batch: the batch's place in the result, where the caller knows it.

        Returns:
            An operand; for a function with a tuple of results, a tuple of them.
        """
        operands = list(operands_in(args))
        if all(isinstance(x, Constant) for x in operands):
            trainable = [x for x in operands if x.trainable]
            if not trainable or (reshapes and not any(x.shared for x in trainable)):
                return self._fold(function, args, bool(trainable))
        lowered = map_operands(args, self._lowering(operands))
        node = self._create(
            "call_function", function, tuple(map_operands(lowered, lambda x: x.node))
        )
        result = self._settle(node, function, lowered, operands, batch)
        if moves and isinstance(result, Dynamic) and (value := result.fixed) is not None:
            return Constant(value, False, True, node.name)
        return result

    def module(self, module: nn.Module, *operands: Operand) -> Any:
        """A call of `module`, which becomes a submodule under the ONNX node's name."""
        assert self._origin is not None
        path = self._unique(self._origin.name)
        self._root.add_module(path, module)
        lowered = [self._on_device(x) for x in operands]
        node = self._create("call_module", path, tuple(x.node for x in lowered))
        # Tried in evaluation, lest batch statistics be needed or changed.
        return self._settle(node, module.eval(), lowered, operands, None)

    def finish(self) -> fx.GraphModule:
        """The module, in training mode, without nodes and constants that turned out unused."""
        self._origin = None
        results = []
        for name in self.file.outputs:
            if name not in self.values:
                raise self.fail(f"no node makes the output {name!r}")
            results.append(self._on_device(self.values[name]).node)
        self._graph.output(results[0] if len(results) == 1 else tuple(results))
        for node in reversed(self._graph.nodes):
            if node.op not in ("placeholder", "output") and not node.users:
                self._graph.erase_node(node)
        module = fx.GraphModule(self._root, self._graph)
        module.graph.lint()
        return module.train()

    def _fold(self, function: Callable[..., Any], args: Any, trainable: bool) -> Any:
        assert self._origin is not None
        with torch.no_grad():
            result = function(*map_operands(args, lambda x: x.tensor))
        outputs = self._origin.outputs
        if isinstance(result, Tensor):
            return self.constant(outputs[0], result.contiguous(), trainable)
        return tuple(
            self.constant(name, part.contiguous(), trainable)
            for name, part in zip(outputs, result, strict=False)
        )

    def _lowering(self, operands: Sequence[Any]) -> Callable[[Any], Dynamic]:
        """How this call's operands become fx nodes: all on the host, or all on the device."""
        data = [x for x in operands if not isinstance(x, Setting)]
        host = all(
            x.host
            if isinstance(x, Dynamic)
            else not x.trainable and x.tensor.numel() <= _LITERAL_LIMIT
            for x in data
        )
        if host:
            return self._on_host
        lowered = {id(x): self._on_device(x) for x in data}
        device = next(x for x in lowered.values() if not x.host)

        def lower(x: Any) -> Dynamic:
            if isinstance(x, Setting):
                return x.value
            own = lowered[id(x)]
            if not own.host:
                return own
            node = self._create("call_function", beside, (own.node, device.node))
            return self._settle(node, beside, (own, device), (), None)  # type: ignore[no-any-return]

        return lower

    def _on_host(self, x: Any) -> Dynamic:
        if isinstance(x, Setting):
            return x.value
        if isinstance(x, Dynamic):
            return x
        # A literal, not a buffer: it must stay on the CPU when the model moves.
        node = self._create("call_function", torch.tensor, (x.tensor.tolist(),))
        node.kwargs = {"dtype": x.tensor.dtype}
        return Dynamic(node, (x.tensor, x.tensor), None)

    def _on_device(self, x: Operand) -> Dynamic:
        """The fx node of an operand; constants are fetched from the module."""
        if isinstance(x, Dynamic):
            return x
        state = x.state
        path = self._attributes.get(id(state))
        if path is None:
            path = self._attributes[id(state)] = self._unique(x.name)
            if isinstance(state, nn.Parameter):
                self._root.register_parameter(path, state)
            else:
                self._root.register_buffer(path, state)
        node = self._create("get_attr", path, ())
        fake = self._mode.from_tensor(state)
        return Dynamic(node, (fake, fake), None)

    def _create(self, op: str, target: Any, args: tuple[Any, ...]) -> fx.Node:
        if op == "get_attr" or self._origin is None:
            name = str(target)
        else:
            name = identifier(self._origin.name)
        node = self._graph.create_node(op, target, args, name=name)
        if self._origin is not None:
            node.meta["onnx"] = (self._origin.name, self._origin.op_type)
        return node

    def _settle(
        self,
        node: fx.Node,
        function: Callable[..., Any],
        args: Any,
        operands: Iterable[Any],
        batch: BatchAxis | None,
    ) -> Any:
        small = self._try(function, args, 0)
        large = self._try(function, args, 1)
        if not isinstance(small, Tensor):
            return self._unpack(node, small, large, operands)
        origins = [x for x in operands if isinstance(x, Dynamic) and x.carries_batch]
        result = Dynamic(node, (small, large), batch)
        if result.host:
            return result
        if origins and self.fixed and not result.carries_batch:
            raise self.fail(
                "it mixes or drops the samples of a batch (the first dimension of the inputs is "
                "the batch); export the model with a free batch dimension"
            )
        if batch is None:
            found = [x.batch for x in origins if x.batch is not None]
            batch = find_batch(small.shape, large.shape, self.batches, found)
        return Dynamic(node, (small, large), batch)

    def _unpack(
        self, node: fx.Node, small: Any, large: Any, operands: Iterable[Any]
    ) -> tuple[Dynamic, ...]:
        parts = []
        for k in range(len(small)):
            part = self._create("call_function", operator.getitem, (node, k))
            whole = Dynamic(node, (small, large), None)
            parts.append(self._settle(part, operator.getitem, (whole, k), operands, None))
        return tuple(parts)

    def _try(self, function: Callable[..., Any], args: Any, k: int) -> Any:
        with torch.no_grad(), quiet():
            try:
                return function(*map_operands(args, lambda x: x.probes[k]))
            except Exception as error:  # torch's checks of shapes and dtypes raise anything
                reason = one_line(error)[:200]
                if k == 0:
                    raise self.fail(f"torch can't compute it: {reason}") from error
                raise self.fail(
                    f"works for a batch of {self.batches[0]} only ({reason}); export the model "
                    "with a free batch dimension"
                ) from error

    def _unique(self, name: str) -> str:
        base = candidate = identifier(name)
        k = 0
        while candidate in self._taken:
            k += 1
            candidate = f"{base}_{k}"
        self._taken.add(candidate)
        return candidate


def can_train(tensor: Tensor) -> bool:
    """Whether it may be a weight: a float tensor with dimensions, and no mask."""
    if not tensor.is_floating_point() or tensor.dim() == 0 or tensor.numel() == 0:
        return False
    limit = min(_NO_WEIGHT, torch.finfo(tensor.dtype).max / 2)
    return bool((tensor.abs() < limit).all())


def identifier(name: str) -> str:
    """`name` as an identifier: letters, digits and _, with no digit first; not ``self``, which is
    the module in fx's code."""
    text = re.sub(r"[^0-9A-Za-z_]", "_", name)
    if text == "self":
        return "self_"
    return text if re.match(r"[A-Za-z_]", text) else f"n{text}"


# One ONNX node on its way into the graph: what an operator's handler sees of it -----------------

Handler: TypeAlias = "Callable[[Operation], Operand] | Callable[[Operation], Sequence[Operand]]"


class Operation:
    """A node with its operands, and what its handler can make of them.

    Attributes:
        opset: the version of the standard operators that the file uses.
        inputs: None where an optional one is left out.
        call, module, fail: the builder's, whose node at hand this is.
        call_many: a call of a function that gives a tuple.
    """

    def __init__(self, node: OnnxNode, builder: GraphBuilder) -> None:
        self.node, self.builder = node, builder
        self.call: Callable[..., Operand] = builder.call
        self.call_many: Callable[..., tuple[Operand, ...]] = builder.call
        self.module: Callable[..., Operand] = builder.module
        self.fail = builder.fail
        self.opset = builder.file.opset
        self._read: set[str] = set()
        for name in node.inputs:
            if name and name not in builder.values:
                raise builder.fail(f"its input {name!r} isn't made by any node before it")
        self.inputs = tuple(builder.operand(name) if name else None for name in node.inputs)

    def input(self, k: int) -> Operand:
        """The k-th input, which must be there."""
        found = self.inputs[k] if k < len(self.inputs) else None
        if found is None:
            raise self.fail(f"lacks its input {k + 1}")
        return found

    def optional(self, k: int) -> Operand | None:
        """The k-th input, or None."""
        return self.inputs[k] if k < len(self.inputs) else None

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute's value, or what it is by default."""
        self._read.add(name)
        return self.node.attributes.get(name, default)

    def ignore(self, *names: str) -> None:
        """Say that attributes don't matter here."""
        self._read.update(names)

    def require(self, name: str, *allowed: Any) -> None:
        """Refuse values of an attribute but these; the first is its default."""
        value = self.attribute(name, allowed[0])
        if value not in allowed:
            raise self.fail(f"its {name} is {value!r}; only {allowed[0]!r} can be imported")

    def setting(self, k: int, default: Any = None) -> Any:
        """An input that isn't data: a number, a tuple of numbers, or a Setting to compute it."""
        found = self.optional(k)
        if found is None:
            return default
        if isinstance(found, Constant):
            value = found.tensor.tolist()
            return tuple(value) if isinstance(value, list) else value
        fixed = found.fixed
        if fixed is not None:
            value = fixed.tolist()
            return tuple(value) if isinstance(value, list) else value
        if not found.host:
            raise self.fail(f"its input {k + 1} depends on data; it must be a constant or a size")
        return Setting(found)

    def known(self, k: int, what: str, default: Any = None) -> Any:
        """A setting that must be known before the model runs."""
        value = self.setting(k, default)
        if isinstance(value, Setting):
            raise self.fail(f"its {what} depends on the batch size, which can't be imported")
        return value

    def tensor(self, k: int) -> Tensor:
        """The k-th input with the file's batch size; without data unless it is a constant."""
        found = self.input(k)
        result: Tensor = found.tensor if isinstance(found, Constant) else found.probes[0]
        return result

    def shape(self, k: int = 0) -> tuple[int, ...]:
        """The k-th input's shape with the file's batch size."""
        return tuple(self.tensor(k).shape)

    def axis(self, value: int) -> int:
        """A dimension of the first input, counted from the start."""
        rank = len(self.shape())
        if not -rank <= value < max(rank, 1):
            raise self.fail(f"its axis {value} is none of a tensor with {rank} dimensions")
        return value % max(rank, 1)

    def batch_dim(self) -> int | None:
        """The dimension of the first input that holds the batch."""
        found = self.input(0)
        return found.batch.dim if isinstance(found, Dynamic) and found.batch else None

    def assign(self, module: nn.Module, name: str, value: Constant | None) -> None:
        """Give a module its weight: a parameter, or a buffer where it isn't trainable."""
        if name in module._parameters:
            delattr(module, name)
        state = value.state if value is not None else None
        if state is None or isinstance(state, nn.Parameter):
            module.register_parameter(name, state)
        else:
            module.register_buffer(name, state)

    def finish(self, results: Operand | Sequence[Operand]) -> None:
        """Bind the results to the node's outputs.

        Raises TargetError for outputs that others use and the handler hasn't made, and for
        attributes that it hasn't looked at.
        """
        if isinstance(results, (Constant, Dynamic)):
            results = (results,)
        unread = sorted(set(self.node.attributes) - self._read)
        if unread:
            raise self.fail(f"its attribute {unread[0]!r} isn't known")
        for k, name in enumerate(self.node.outputs):
            if k < len(results):
                self.builder.values[name] = results[k]
            elif name and self.builder.uses[name]:
                raise self.fail(f"its output {k + 1} is used, which can't be imported")
