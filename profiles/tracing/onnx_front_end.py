"""Front end: the graph of an ONNX file, as the importer made it."""

from __future__ import annotations

from torch import fx, nn

from .call import Call
from .graph import TracedModel, fetch_attribute
from .layers import Home, group


def trace_onnx(model: nn.Module, call: Call, granularity: str) -> TracedModel:
    """The imported graph in layers: operators with weights or a module of their own begin one."""
    assert isinstance(model, fx.GraphModule)
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
    inputs = tuple(node for node in graph.nodes if node.op == "placeholder")
    return TracedModel(fx.GraphModule(model, graph), layers, inputs, "onnx", granularity)
