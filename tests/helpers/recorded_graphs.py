"""A stand-in for CUDA graphs on the CPU: operations are recorded with the memory that they have,
and called again, on that memory, when the graph is replayed.

As on a card: a capture computes nothing (what it has written is put back, its results are NaN until
the first replay); a tensor whose memory has moved is read and written where it was; memory that was
let go since is an error; and graphs that share a pool write over what was let go before they were
captured.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from timeprest.profiles.autograd.boundary import storage_key
from timeprest.profiles.measuring import capture
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ATEN = torch.ops.aten
NOTHING = {ATEN.set_, ATEN.detach, ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty}


def same_memory(tensor):
    """Another tensor with this one's memory, which stays with it."""
    found = torch.empty(0, dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    found.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    found = found.conj() if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found


def as_bytes(tensor):
    """All of the memory behind a tensor."""
    found = torch.empty(0, dtype=torch.uint8)
    return found.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),))


def _unseen():
    """References to a storage besides its one tensor's, once Python has looked at it."""
    tensor = torch.zeros(1)
    return torch._C._storage_Use_Count(storage_key(tensor)) - 1


_UNSEEN = _unseen()


class Recorded:
    """A graph: calls, tensors that came from elsewhere, and those that it made, by storage."""

    def __init__(self, pool):
        self.pool, self.calls = pool, []
        self.given, self.made, self.aliases = {}, {}, {}
        self.free = []

    def alias(self, tensor):
        layout = tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype
        key = (storage_key(tensor), *layout, tensor.is_conj(), tensor.is_neg())
        if key not in self.aliases:
            self.aliases[key] = same_memory(tensor)
        return self.aliases[key]

    def references(self, storage):
        """To a storage, from here."""
        own = sum(key[0] == storage for key in self.aliases)
        return own + (storage in self.given) + (storage in self.made)

    def let_go(self, storage):
        """Whether nobody else has it."""
        return torch._C._storage_Use_Count(storage) <= self.references(storage) + _UNSEEN

    def replay(self):
        for storage in self.given:
            if self.let_go(storage) and not any(storage in g.made for g in self.pool):
                raise RuntimeError("a graph has memory that was let go")
        after = self.pool[self.pool.index(self) + 1 :]
        for memory in [*self.free, *(m for graph in after for m in graph.made.values())]:
            memory.fill_(255)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for func, args, kwargs, outputs in self.calls:
                found = tree_leaves(func(*args, **kwargs))
                for own, other in zip(outputs, found, strict=True):
                    if own is not None and storage_key(own) != storage_key(other):
                        own.copy_(other)


class Recording(TorchDispatchMode):
    """Records what is called."""

    def __init__(self, graph):
        super().__init__()
        self.graph, self.before = graph, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        graph, kwargs = self.graph, kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for t in given:
            key = storage_key(t)
            if key not in graph.made and key not in graph.given and t.numel():
                graph.given[key] = as_bytes(t)
                self.before[key] = graph.given[key].clone()
        with torch._C.DisableTorchFunction():
            made = func(*args, **kwargs)
        outputs = [t if isinstance(t, torch.Tensor) else None for t in tree_leaves(made)]
        mutable = func._schema.is_mutable or func.overloadpacket.__name__ == "native_batch_norm"
        inside = {storage_key(t) for t in given}
        for t in outputs:
            if t is not None and t.numel() and storage_key(t) not in inside | graph.given.keys():
                graph.made.setdefault(storage_key(t), as_bytes(t))
        new = [t for t in outputs if t is not None and storage_key(t) not in inside]
        if func.overloadpacket not in NOTHING and (mutable or new):
            kept = tree_map_only(torch.Tensor, graph.alias, (args, kwargs))
            graph.calls.append((func, *kept, [t if t is None else graph.alias(t) for t in outputs]))
        return made


class RecordedGraphs(capture.Capture):
    """Captures on the CPU."""

    captured, fails_at, pools, free = 0, None, (), 2**40

    def __init__(self, device):
        self._device = device

    def pool(self):
        type(self).pools = (*self.pools, [])
        return self.pools[-1]

    def held_bytes(self):
        graphs = (graph for pool in self.pools for graph in pool)
        return sum(memory.numel() for graph in graphs for memory in graph.made.values())

    def free_bytes(self):
        return self.free - self.held_bytes()

    @contextmanager
    def of(self, pool):
        type(self).captured += 1
        graph, drawn = Recorded(pool), torch.get_rng_state()
        for other in pool:
            graph.free += [m for key, m in other.made.items() if other.let_go(key)]
        recording = Recording(graph)
        with recording, capture.Capturable(self._device):
            yield graph
            if self.captured == self.fails_at:
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        pool.append(graph)
        torch.set_rng_state(drawn)
        for key, memory in graph.given.items():
            memory.copy_(recording.before[key])
        for memory in graph.made.values():
            memory.fill_(255)

    @contextmanager
    def aside(self):
        yield
