"""An ONNX file as a target, and the front end that its graph is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torch import fx, nn

from ..errors import TargetError, TraceError
from ..target import InputSpec, Target
from ..tasks.objects import joined
from ..tracing.call import Call
from ..tracing.front_ends import OWN_FRONT_END
from ..tracing.graph import GraphBody, TracedModel, fetch_attribute
from ..tracing.layers import Home, group
from .file import OnnxInput, open_inputs, read_file, sizes_in
from .model import ONNX, import_onnx


def open_target(name: str, inputs: Sequence[InputSpec]) -> Target:
    """An ONNX file as what is profiled. Inputs given by hand replace what it says of its own, and
    give its free dimensions their sizes."""
    given: tuple[InputSpec, ...] = ()
    sizes: dict[str, int] = {}
    if inputs:
        found = open_inputs(name)
        given = _in_order(name, inputs, list(found))
        sizes = sizes_in(name, found, [spec.shape for spec in given])
    inside = read_file(name, sizes).inputs
    own = tuple(InputSpec(spec.shape, spec.dtype) for spec in inside)
    if given:
        given = tuple(_of_dtype(name, *each) for each in zip(given, inside, strict=True))
    # Read again for every model: training must not start from what profiling left behind.
    return Target(name, None, lambda: import_onnx(name, sizes=sizes), given or own, ONNX)


def _of_dtype(target: str, given: InputSpec, inside: OnnxInput) -> InputSpec:
    """What was given of an input, in the file's dtype. Raises TargetError for another one."""
    if given.says_dtype and given.dtype != inside.dtype:
        own, other = (str(dtype).partition(".")[2] for dtype in (inside.dtype, given.dtype))
        raise TargetError(
            f"{target}: --input gives {inside.name!r} as {other}, and in the file it is {own}: "
            "leave the dtype out, or export the model with another one"
        )
    return replace(given, dtype=inside.dtype)


def _in_order(
    target: str, inputs: Sequence[InputSpec], names: Sequence[str]
) -> tuple[InputSpec, ...]:
    """Inputs given by hand in the order of an ONNX file's: those with names where the names are,
    the others in turn. All go by position then, as the graph takes them."""
    named = {spec.name: spec for spec in inputs if spec.name is not None}
    has = joined([repr(name) for name in names])
    for name in named:
        if name not in names:
            raise TargetError(
                f"{target}: --input {name}=…: the file has no input of that name; it has {has}"
            )
    unnamed = [spec for spec in inputs if spec.name is None]
    if len(named) + len(unnamed) < len(inputs):
        twice = Counter(spec.name for spec in inputs if spec.name is not None).most_common(1)[0][0]
        raise TargetError(f"{target}: --input {twice}=… is given twice: give it once")
    if len(inputs) != len(names):
        raise TargetError(
            f"{target}: takes {len(names)} inputs, but --input was given {len(inputs)}; give one "
            f"for each of {has}"
        )
    rest = iter(unnamed)
    found = [named[name] if name in named else next(rest) for name in names]
    return tuple(replace(spec, name=None) for spec in found)


def trace_onnx(model: nn.Module, call: Call, granularity: str) -> TracedModel:
    """The imported graph in layers: operators with weights or a module of their own begin one."""
    if not isinstance(model, fx.GraphModule) or model.meta.get(OWN_FRONT_END) != ONNX:
        raise TraceError("isn't the graph of an ONNX file")
    graph = fx.Graph()
    graph.output(graph.graph_copy(model.graph, {}))

    def homes(node: fx.Node) -> list[Home]:
        name, kind = node.meta.get("onnx", ("", ""))
        path = str(node.target) if node.op == "call_module" else node.name
        begins = node.op == "call_module" or any(
            isinstance(fetch_attribute(model, str(source.target)), nn.Parameter)
            for source in node.all_input_nodes
            if source.op == "get_attr"
        )
        return [Home(path, kind, name)] if begins else []

    layers = group(graph, granularity, homes, model)
    return TracedModel(GraphBody(model, graph), layers, ONNX, granularity)
