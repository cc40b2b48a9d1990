"""One ONNX node on its way into the graph: what an operator's handler sees of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from ..errors import TargetError
from .batch import BatchAxis
from .builder import GraphBuilder
from .file import FileNode
from .values import Constant, Dynamic, Operand, Setting

Handler: TypeAlias = "Callable[[Operation], Operand] | Callable[[Operation], Sequence[Operand]]"


class Operation:
    """A node with its operands, and what its handler can make of them.

    Attributes:
        opset: the version of the standard operators that the file uses.
        inputs: None where an optional one is left out.
    """

    def __init__(self, node: FileNode, builder: GraphBuilder) -> None:
        self.node, self.builder = node, builder
        self.opset = builder.file.opset
        self._read: set[str] = set()
        for name in node.inputs:
            if name and name not in builder.values:
                raise builder.fail(f"its input {name!r} isn't made by any node before it")
        self.inputs = tuple(builder.values[name] if name else None for name in node.inputs)

    def has(self, k: int) -> bool:
        """Whether the k-th input is given."""
        return k < len(self.inputs) and self.inputs[k] is not None

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

    def axis(self, value: int, rank: int | None = None) -> int:
        """A dimension of the first input (or of that many), counted from the start."""
        rank = len(self.shape()) if rank is None else rank
        if not -rank <= value < max(rank, 1):
            raise self.fail(f"its axis {value} is none of a tensor with {rank} dimensions")
        return value % max(rank, 1)

    def batch_dim(self, k: int = 0) -> int | None:
        """The dimension of the k-th input that holds the batch."""
        found = self.input(k)
        return found.batch.dim if isinstance(found, Dynamic) and found.batch else None

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        moves: bool = False,
        reshapes: bool = False,
        batch: BatchAxis | None = None,
    ) -> Operand:
        """A function call, or a constant: see GraphBuilder.call."""
        result: Operand = self.builder.call(
            function, *args, moves=moves, reshapes=reshapes, batch=batch
        )
        return result

    def call_many(self, function: Callable[..., Any], *args: Any) -> tuple[Operand, ...]:
        """A call of a function that gives a tuple."""
        results: tuple[Operand, ...] = self.builder.call(function, *args)
        return results

    def module(self, module: nn.Module, *operands: Operand) -> Operand:
        """A layer under this node's name: see GraphBuilder.module."""
        result: Operand = self.builder.module(module, *operands)
        return result

    def assign(self, module: nn.Module, name: str, value: Constant | None) -> None:
        """Give a module its weight: a parameter, or a buffer where it isn't trainable."""
        if name in module._parameters:
            delattr(module, name)
        state = value.state if value is not None else None
        if state is None or isinstance(state, nn.Parameter):
            module.register_parameter(name, state)
        else:
            module.register_buffer(name, state)

    def fail(self, reason: str) -> TargetError:
        """An error about this node."""
        return self.builder.fail(reason)

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
