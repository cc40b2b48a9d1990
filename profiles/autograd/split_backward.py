"""A backward in two parts: gradients of what came in first, those of the weights later.

The autograd graph of a micro-batch has a *chain*: the nodes on the way from its outputs to what
the stage received. Gradients of weights branch off that chain. The first part runs the chain alone
and keeps the gradients that arrive at the nodes where weights branch off; the second part starts
from those nodes and runs what leads off the chain to the weights, nothing twice.

Where the same weight branches off at two nodes, one behind the other on the chain, a run from one
of them would follow the chain to the other. Such a weight gets all of its gradient in the first
part; so do those of group norms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from .boundary import Inlet, give_gradients_own_memory, storage_bytes, storage_key

_WHOLE = "NativeGroupNormBackward0"
"""A backward that is run as a whole: in channels_last, torch's (2.13) ends the process where it is
asked for its weights' gradients alone."""

_Entry = tuple[GradientEdge, Tensor]
"""A place in the graph, and the gradient that arrives there."""


class SplitBackward:
    """The backward of one micro-batch.

    Attributes:
        held_bytes: of gradients kept for the second part; 0 before the first and after the second.
    """

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        grads: Sequence[Tensor],
        inlets: Iterable[Inlet],
        parameters: Iterable[nn.Parameter],
    ) -> None:
        """Gradients of the roots' shapes enter the graph there; inlets are what the stage received
        and must send gradients back for."""
        self._entries = list(zip(roots, grads, strict=True))
        self._anchors = [inlet.anchor for inlet in inlets if inlet.anchor is not None]
        self._parameters = list(parameters)
        # What the second part runs, the last first: gradients, the weights they are run to, and
        # the node of the chain where that begins.
        self._waiting: list[tuple[list[_Entry], list[nn.Parameter], Node | None]] = []
        self.held_bytes = 0

    def inputs(self) -> None:
        """First part: the inlets get their gradients."""
        graph = _BackwardGraph(
            [root.node for root, _ in self._entries], self._anchors, self._parameters
        )
        captured: dict[Node, Sequence[Tensor | None]] = {}
        if graph.chain:
            keep = captured.__setitem__
            handles = [node.register_prehook(partial(keep, node)) for node in graph.branches]
            try:
                _run(self._entries, [*self._anchors, *graph.at_once])
            finally:
                for handle in handles:
                    handle.remove()
        for node, reached in graph.branches.items():
            grads = enumerate(captured.get(node, ()))
            entries = [(GradientEdge(node, k), grad) for k, grad in grads if grad is not None]
            self._waiting.append((entries, reached, node))
        aside = [entry for entry in self._entries if entry[0].node not in graph.chain]
        self._waiting.append((aside, graph.off_chain, None))
        # So all of the graph that lies behind the last branch is let go.
        self._entries = []
        # A loss's own gradient, one number, doesn't count.
        kept = [grad for entries, *_ in self._waiting for _, grad in entries if grad.dim()]
        self.held_bytes = sum({storage_key(t): storage_bytes(t) for t in kept}.values())

    def weights(self) -> None:
        """Second part: gradients of the weights are added to what is there."""
        while self._waiting:
            entries, reached, node = self._waiting.pop()
            if not entries or not reached:
                continue
            fresh = [p for p in reached if p.grad is None]
            handle = None if node is None else node.register_prehook(_giver(entries))
            try:
                _run(entries, reached)
            finally:
                if handle is not None:
                    handle.remove()
            give_gradients_own_memory(fresh, (grad for _, grad in entries))
        self.held_bytes = 0


def _giver(entries: Sequence[_Entry]) -> Callable[[Sequence[Tensor | None]], Any]:
    """Hooks on the tensor that a node made have run in the first part: what they make of their own
    result isn't taken."""
    kept = {edge.output_nr: grad for edge, grad in entries}

    def give(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return tuple(kept.get(k) for k in range(len(grads)))

    return give


def _run(entries: Sequence[_Entry], leaves: Sequence[Tensor]) -> None:
    """Run autograd to these leaves alone; the graph stays."""
    torch.autograd.backward(
        [edge for edge, _ in entries],
        [grad for _, grad in entries],
        retain_graph=True,
        inputs=leaves,
    )


class _BackwardGraph:
    """Which way the weights lie.

    Attributes:
        chain: nodes that lead to what came in.
        branches: nodes of the chain where weights branch off, and the weights that each one leads
            to off the chain; those nearest to what came in first.
        off_chain: weights that roots off the chain lead to.
        at_once: weights that can't wait: they branch off twice, one place behind the other, or at
            a backward that is run as a whole.
    """

    def __init__(
        self, roots: Sequence[Node], anchors: Sequence[Tensor], parameters: Sequence[nn.Parameter]
    ) -> None:
        arrivals = {id(anchor) for anchor in anchors}
        weights = {id(p): p for p in parameters}
        self.chain: set[Node] = set()
        branches: dict[Node, dict[int, Any]] = {}
        # Per node off the chain, the weights that it leads to.
        leads: dict[Node, dict[int, Any]] = {}
        order = _children_first(roots)
        for node in order:
            if not node.next_functions:
                variable = getattr(node, "variable", None)
                if id(variable) in arrivals:
                    self.chain.add(node)
                else:
                    key = id(variable)
                    leads[node] = {key: variable} if key in weights else {}
                continue
            found: dict[int, Any] = {}
            on_chain = False
            for child, _ in node.next_functions:
                if child in self.chain:
                    on_chain = True
                elif child is not None:
                    found = {**found, **leads[child]} if found else leads[child]
            if not on_chain:
                leads[node] = found
                continue
            self.chain.add(node)
            if found:
                branches[node] = found
        off_chain: dict[int, Any] = {}
        for root in roots:
            off_chain.update(leads.get(root, {}))
        at_once = self._twice(order, branches)
        at_once.update(*(found for node, found in branches.items() if node.name() == _WHOLE))
        self.at_once = [weights[key] for key in at_once]
        self.off_chain = [p for key, p in off_chain.items() if key not in at_once]
        kept = (
            (node, [p for key, p in found.items() if key not in at_once])
            for node, found in branches.items()
        )
        self.branches = {node: reached for node, reached in kept if reached}

    def _twice(
        self, children_first: Sequence[Node], branches: dict[Node, dict[int, Any]]
    ) -> set[int]:
        """Weights that branch off at a node and again behind it on the chain."""
        places = Counter(key for found in branches.values() for key in found)
        several = {key for key, count in places.items() if count > 1}
        twice: set[int] = set()
        behind: dict[Node, set[int]] = {}
        for node in filter(self.chain.__contains__, children_first) if several else ():
            children = [child for child, _ in node.next_functions if child is not None]
            found = {key for child in children for key in behind.get(child, ())}
            own = several.intersection(branches.get(node, ()))
            twice |= own & found
            behind[node] = own | found
        return twice


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """All nodes that the roots lead to, each after those that it leads to itself."""
    order: list[Node] = []
    seen: set[Node] = set()
    pending: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while pending:
        node, done = pending.pop()
        if done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        pending.append((node, True))
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                pending.append((child, False))
    return order
