"""Front end: torch.export. Takes what symbolic tracing can't: shapes and None are at hand."""

from __future__ import annotations

import inspect
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import TraceError
from .call import Call
from .fx import functions_called, transformers_opened
from .graph import GraphBody, TracedModel, fetch_attribute, output_node
from .layers import Home, group
from .pieces import fill, take_apart

_PREFIX = "model."


class _Flat(nn.Module):
    """The model as export takes it: a tuple of tensors in, a flat tuple of tensors out."""

    def __init__(self, model: nn.Module, call: Call, found: list[Any]) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._call = call
        self._found = found

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaves, structure = take_apart(self._call.of(self.model, tensors))
        self._found.append(structure)
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
        checks = "check_guards" in inspect.signature(program.module).parameters
        exported = program.module(check_guards=False) if checks else program.module()
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
    copies: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, Any] = {}
    inputs = [node for node in exported.graph.nodes if node.op == "placeholder"]
    for node, label in zip(inputs, call.labels(signature), strict=True):
        copies[node] = graph.placeholder(label)
    for node in exported.graph.nodes:
        if node.op == "get_attr":
            path = str(node.target)
            target = path.removeprefix(_PREFIX)
            found = own.get(target)
            attributes[target] = fetch_attribute(exported, path) if found is None else found
            copies[node] = graph.create_node("get_attr", target, name=node.name)
        elif node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    (leaves,) = output_node(exported.graph).args
    nodes = tuple(copies[leaf] for leaf in leaves)  # type: ignore[union-attr, index]
    graph.output(fill(structure, nodes, graph.call_function))
    return graph, attributes


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
