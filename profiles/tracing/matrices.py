"""Which parameters are matrices of hidden layers: those that Muon is for.

By Muon's documentation that leaves out embeddings, and by its author's also the output layer. Our
reading of these: the tables of nn.Embedding and nn.EmbeddingBag, and whatever else an operation
looks rows up in; and the matrices of the last operation that has any.
"""

from __future__ import annotations

from torch import nn

from .graph import TracedModel, graph_of, operation_name, state_of

_LOOKUPS = ("embedding", "embedding_bag", "gather", "index_select")
"""Operations whose matrices are tables."""


def hidden_matrices(traced: TracedModel, model: nn.Module) -> tuple[nn.Parameter, ...]:
    """The model's parameters of two dimensions that its hidden layers multiply by, each once.

    Args:
        model: that was traced; both share their parameters.
    """
    tables = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for p in module.parameters(recurse=False)
    }
    used: dict[int, nn.Parameter] = {}
    last: set[int] = set()
    for node in graph_of(traced.module).nodes:
        state = state_of(traced, [node]).values()
        mine = [p for p in state if isinstance(p, nn.Parameter) and p.dim() == 2]
        if node.op != "call_module" and operation_name(node) in _LOOKUPS:
            tables |= {id(p) for p in mine}
        used |= {id(p): p for p in mine}
        last = {id(p) for p in mine if id(p) not in tables} or last
    return tuple(p for key, p in used.items() if key not in tables | last)
