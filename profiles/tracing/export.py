"""Front end: torch.export. Takes what symbolic tracing can't: shapes and None are at hand."""

from __future__ import annotations

import inspect
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import TraceError
from .call import Call
from .fx import functions_called, transformers_opened
from .graph import GraphBody, TracedModel, fetch_attribute, output_node
from .layers import Home, group, without_gradient
from .pieces import fill, take_apart

_PREFIX = "model."


class _Flat(nn.Module):
    """The model as export takes it: a tuple of tensors in, a flat tuple of tensors out."""

    def __init__(self, model: nn.Module, call: Call, found: list[Any]) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._call = call
        # A list of its own would be state, which torch compares before and after.
        self._note = found.append

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaves, structure = take_apart(self._call.of(self.model, tensors))
        self._note(structure)
        return leaves


def trace_export(
    model: nn.Module, call: Call, granularity: str, *, free_batch: bool
) -> TracedModel:
    """Export `model`. Raises whatever torch.export or the user's forward raises.

    Under autocast, what that converts would be operations of the graph, also in a run without: it
    is off here, unless the forward asks whether it is on.

    Args:
        call: inputs to export with; two samples or more where the batch is free.
        free_batch: leave the first dimension of every input open; else the graph takes
            only as many samples as `call` has.
    """
    kinds = [kind for kind in AUTOCASTS if torch.is_autocast_enabled(kind)]
    if kinds:
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            asked = stack.enter_context(_asking_for_autocast())
            try:
                found = _exported(model, call, granularity, free_batch)
            except Exception:  # by the other branch, maybe
                if not asked:
                    raise
            if not asked:
                return found
        call = call.with_tensors([t.clone() for t in call.tensors])
    return _exported(model, call, granularity, free_batch)


AUTOCASTS = ("cpu", "cuda")
"""Kinds of devices that autocast is switched on for, each by itself."""

_ASKS = (
    *("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cache_enabled"),
    *("is_autocast_cpu_enabled", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype"),
)


@contextmanager
def _asking_for_autocast() -> Iterator[list[str]]:
    """What is asked of autocast meanwhile, by others than torch itself."""
    asked: list[str] = []
    own = {name: getattr(torch, name) for name in _ASKS if hasattr(torch, name)}

    def noting(name: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            if not str(sys._getframe(1).f_globals.get("__name__")).startswith("torch."):
                asked.append(name)
            return own[name](*arguments)

        return ask

    try:
        for name in own:
            setattr(torch, name, noting(name))
        yield asked
    finally:
        for name, function in own.items():
            setattr(torch, name, function)


def _exported(model: nn.Module, call: Call, granularity: str, free_batch: bool) -> TracedModel:
    varying = call.varying or ((),) * len(call.tensors)
    shapes = tuple(
        dict.fromkeys((0, *more), torch.export.Dim.DYNAMIC) if t.dim() else None
        for t, more in zip(call.tensors, varying, strict=True)
    )
    structures: list[Any] = []
    with _silent(), functions_called(), transformers_opened():
        program = torch.export.export(
            _Flat(model, call, structures),
            (call.tensors,),
            dynamic_shapes=(shapes,) if free_batch else None,
            strict=False,
        )
        if free_batch:
            _check_free(program)
        # The checks of input shapes would be an operation of nobody's.
        exported = program.module(check_guards=False)
    for body in exported.modules():
        _leave_out_types(body)
    graph, attributes = _copy(exported, model, call, structures[-1])
    module = GraphBody(attributes, graph)
    module.training = model.training
    layers = group(graph, granularity, _homes, model)
    only_size = None if free_batch else call.tensors[0].shape[0]
    front_end = "export" if free_batch else "export-static"
    return TracedModel(module, layers, front_end, granularity, only_size)


_ENDLESS = 1 << 30
"""Samples, above any that a micro-batch has."""


def _check_free(program: torch.export.ExportedProgram) -> None:
    """Raise TraceError where a graph is for few samples alone: torch would have it check that."""
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        size: Any = value.shape[0] if isinstance(value, Tensor) and value.dim() else None
        if isinstance(size, torch.SymInt):
            most = program.range_constraints[size.node.expr].upper
            if most < _ENDLESS:
                raise TraceError(f"the forward does something else with more than {most} samples")


def _leave_out_types(body: nn.Module) -> None:
    """Leave out checks that tensors have the types of the trace: under autocast some have others,
    and are converted all the same."""
    if isinstance(body, fx.GraphModule):
        for node in list(body.graph.nodes):
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                body.graph.erase_node(node)
        body.recompile()


def _copy(
    exported: fx.GraphModule, model: nn.Module, call: Call, structure: Any
) -> tuple[fx.Graph, dict[str, Any]]:
    """The exported graph over the user's own parameters, with the user's result."""
    own = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    signature = list(inspect.signature(model.forward).parameters)
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    attributes: dict[str, Any] = {}
    bodies = {node: _without_gradients(exported, node) for node in exported.graph.nodes}
    opened = {node.args[1] for node, body in bodies.items() if body is not None}
    inputs = [node for node in exported.graph.nodes if node.op == "placeholder"]
    for node, label in zip(inputs, call.labels(signature), strict=True):
        copies[node] = graph.placeholder(label)
    for node in exported.graph.nodes:
        if node in opened:
            continue
        if node.op == "get_attr":
            path = str(node.target)
            target = path.removeprefix(_PREFIX)
            found = own.get(target)
            attributes[target] = fetch_attribute(exported, path) if found is None else found
            copies[node] = graph.create_node("get_attr", target, name=node.name)
        elif (body := bodies[node]) is not None:
            given = [copies[argument] for argument in node.args[2:]]
            copies[node] = _copy_cut_off(graph, body, given, attributes)
        elif node.op == "call_function":
            of: Any = copies.get(node.args[0]) if node.target is getitem else None
            copies[node] = (
                of[node.args[1]]  # a result of such a body
                if isinstance(of, tuple)
                else graph.node_copy(node, copies.__getitem__)
            )
    (leaves,) = output_node(exported.graph).args
    nodes = tuple(copies[leaf] for leaf in leaves)  # type: ignore[union-attr, index]
    graph.output(fill(structure, nodes, graph.call_function))
    return graph, attributes


def _without_gradients(exported: fx.GraphModule, node: fx.Node) -> fx.Graph | None:
    """What an operator does under torch.no_grad, where that may stand in the graph itself: in
    evaluation it does, as all is without gradients."""
    if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or node.args[0]:
        return None
    body: fx.Graph = fetch_attribute(exported, str(node.args[1].target)).graph  # type: ignore[union-attr]
    plain = all(map(_is_plain, (inner for inner in body.nodes if inner.op not in _ENDS)))
    return body if plain else None


_ENDS = ("placeholder", "output")


def _is_plain(node: fx.Node) -> bool:
    """Whether an operation has no body of its own and changes nothing, such as a weight."""
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.is_mutable
    return node.op == "call_function" and not isinstance(
        node.target, torch._ops.HigherOrderOperator
    )


def _copy_cut_off(
    graph: fx.Graph, body: fx.Graph, given: Sequence[fx.Node], attributes: Mapping[str, Any]
) -> tuple[fx.Node, ...]:
    """A body's operations in the graph, cut off from gradients behind each that could have some;
    its results."""
    inputs = [node for node in body.nodes if node.op == "placeholder"]
    copies = dict(zip(inputs, given, strict=True))
    fetched = {node: attributes[str(node.target)] for node in given if node.op == "get_attr"}
    without = {node for node in given if node.op == "placeholder"}
    without |= {node for node, found in fetched.items() if not found.requires_grad}
    for node in body.nodes:
        if node.op in _ENDS:
            continue
        learns = not without.issuperset(map(copies.__getitem__, node.all_input_nodes))
        cut = learns and isinstance(node.meta.get("val"), Tensor)
        made = graph.create_node(
            "call_function",
            node.target,
            *fx.map_arg((node.args, node.kwargs), copies.__getitem__),
            name=f"{node.name}_learning" if cut else node.name,
        )
        made.meta = dict(node.meta)
        if cut:
            # By the name that evaluation has for it.
            made = graph.create_node("call_function", without_gradient, (made,), name=node.name)
            made.meta = dict(node.meta)
        copies[node] = made
        if cut or not learns:
            without.add(made)
    (results,) = output_node(body).args
    return tuple(copies[node] for node in results)  # type: ignore[union-attr]


def _homes(node: fx.Node) -> list[Home]:
    stack = node.meta.get("nn_module_stack") or {}
    found = []
    for call, (path, kind) in stack.items():
        if path.startswith(_PREFIX):
            name = kind if isinstance(kind, str) else kind.__name__
            found.append(
                Home(path.removeprefix(_PREFIX).split("@")[0], name.split(".")[-1], f"{call}{path}")
            )
    return found


@contextmanager
def _silent() -> Iterator[None]:
    """Export warns of attributes that cuDNN's modules set and logs what it may refuse anyway."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch._export", "torch.fx")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        # It prints the graph that it has so far to stderr when it gives up.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
