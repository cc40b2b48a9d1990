"""The same random numbers for the same samples, in whatever pieces a model runs.

A run's stages each draw from a stream of their own, micro-batch by micro-batch, so that none draws
what one process would for a whole mini-batch. For a comparison every call that draws is seen, below
autograd, and each sample's part of what it gives is drawn anew by a generator that is seeded by the
sample and by the call's number in the whole forward.

Which call comes next stands in the seed of torch's own generator: whoever puts that generator's
state back, to run a forward a second time, gets the same numbers again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_RANDOM = frozenset(
    """rand rand_like randn randn_like randint randint_like randperm normal normal_ uniform uniform_
    bernoulli bernoulli_ exponential exponential_ log_normal log_normal_ cauchy cauchy_ geometric
    geometric_ random random_ poisson binomial multinomial _standard_gamma _sample_dirichlet
    """.split()  # noqa: SIM905
)
"""Operations that give nothing but random numbers."""


class RandomCall(NamedTuple):
    """A call that draws.

    Attributes:
        dim: of the tensor that it gives, which goes over samples; None: it has nothing of each.
        rows: of each sample there, one behind the other.
    """

    dim: int | None = None
    rows: int = 1


@dataclass(frozen=True)
class RandomCalls:
    """What draws random numbers in a model's training.

    Attributes:
        calls: of the forward, in its sequence, and behind them the loss's.
        in_forward: how many are the forward's.
        of_pieces: the numbers of those that each piece makes.
    """

    calls: tuple[RandomCall, ...]
    in_forward: int
    of_pieces: tuple[tuple[int, ...], ...]


class _Noted(TorchDispatchMode):
    """Notes the shape of whatever is drawn, and where: in which node of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.node = ""
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def at(self, node: str) -> None:
        """What is drawn next is this node's."""
        self.node = node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            made = func(*args, **(kwargs or {}))
        if _is_random(func) and isinstance(made, Tensor):
            self.shapes.append((self.node, tuple(made.shape)))
        return made


def random_calls(
    forward: Callable[[int], Any],
    loss: Callable[[int, Any], None],
    sizes: tuple[int, int],
    graph: Callable[[Callable[[str], None]], None],
    pieces: Sequence[Collection[str]],
) -> RandomCalls | None:
    """Find what draws random numbers, by running the model.

    Args:
        forward: runs the user's own model on so many samples, and gives its result.
        loss: the task's, of so many samples and that result.
        sizes: two numbers of samples.
        graph: runs the model's graph on the first number of samples, and tells what it is given the
            name of each node before that runs.
        pieces: the names of each piece's nodes.

    Returns None where the graph doesn't draw as the model does. Raises what these raise.
    """
    found, in_forward = [], []
    for size in sizes:
        with _Noted() as noted:
            result = forward(size)
            in_forward.append(len(noted.shapes))
            loss(size, result)
        found.append([shape for _, shape in noted.shapes])
    if not found[0]:
        return RandomCalls((), 0, tuple(() for _ in pieces))
    with _Noted() as noted:
        graph(noted.at)
    drawn = found[0][: in_forward[0]]
    if [shape for _, shape in noted.shapes] != drawn or len(found[0]) != len(found[1]):
        return None
    calls = [_over_samples(a, b, sizes) for a, b in zip(found[0], found[1], strict=True)]
    nodes = [node for node, _ in noted.shapes]
    of_pieces = [tuple(k for k, node in enumerate(nodes) if node in names) for names in pieces]
    return RandomCalls(tuple(calls), len(drawn), tuple(of_pieces))


def _over_samples(
    shape: tuple[int, ...], other: tuple[int, ...], sizes: tuple[int, int]
) -> RandomCall:
    """From the shapes of what a call gives for two numbers of samples."""
    if len(shape) == len(other) and sizes[0] != sizes[1]:
        for dim, (a, b) in enumerate(zip(shape, other, strict=True)):
            if a != b and not a % sizes[0] and b == a // sizes[0] * sizes[1]:
                return RandomCall(dim, a // sizes[0])
    return RandomCall()


class _Place(NamedTuple):
    """Where in training the next call is."""

    piece: int | None
    mini_batch: tuple[int, ...]
    samples: range
    done: int

    @property
    def seed(self) -> int:
        """Of torch's generator, which says so."""
        return _seed("place", self.piece, self.mini_batch, self.samples, self.done)


class SameNumbers(TorchDispatchMode):
    """Gives each sample the same numbers in whatever piece and micro-batch it is. `beyond`: it met
    a call that it doesn't know, whose numbers stayed as they were."""

    def __init__(self, calls: RandomCalls, seed: int) -> None:
        super().__init__()
        self.calls, self._own = calls, seed
        self._places: dict[int, _Place] = {}
        self.beyond = False

    def begin(self, piece: int | None, mini_batch: tuple[int, ...], samples: range) -> None:
        """A forward of a piece, or of the whole model (None), is about to run, on these samples of
        the epoch, in this mini-batch."""
        self._go_to(_Place(piece, mini_batch, samples, 0))

    def _go_to(self, place: _Place) -> None:
        self._places[place.seed] = place
        torch.default_generator.manual_seed(place.seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`; what it draws is drawn sample by sample."""
        # A mode of functions has seen it already.
        with torch._C.DisableTorchFunction():
            return self._call(func, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        given = dict(kwargs or {})
        place = self._places.get(torch.initial_seed()) if _is_random(func) else None
        if place is None:
            return func(*args, **given)
        if "generator" in given:
            given["generator"] = None
        made, number = func(*args, **given), self._number(place)
        try:
            if number is not None:
                self._fill(func, args, given, made, number, place)
        except RuntimeError:  # an operation whose arguments aren't by samples
            number = None
        self.beyond |= number is None
        self._go_to(place._replace(done=place.done + 1))
        return made

    def _number(self, place: _Place) -> int | None:
        """The call's, in the whole forward and loss."""
        calls = self.calls
        own = range(calls.in_forward) if place.piece is None else calls.of_pieces[place.piece]
        if place.done < len(own):
            return own[place.done]
        number = calls.in_forward + place.done - len(own)
        return number if number < len(calls.calls) else None

    def _fill(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Tensor,
        number: int,
        place: _Place,
    ) -> None:
        dim, rows = self.calls.calls[number]
        size = made.shape[dim] if dim is not None and made.dim() > dim else 0
        if dim is None or not size or size % rows or func.overloadpacket.__name__ == "randperm":
            self._seed_for(made, number, place.mini_batch, None)
            made.copy_(func(*args, **kwargs))
            return

        def part(value: Any, first: int) -> Any:
            if isinstance(value, Tensor) and value.dim() == made.dim() and value.shape[dim] == size:
                return value.narrow(dim, first, rows)
            if isinstance(value, (list, tuple, torch.Size)) and list(value) == list(made.shape):
                return [*value[:dim], rows, *value[dim + 1 :]]
            return value

        for k in range(size // rows):
            self._seed_for(made, number, place.mini_batch, _at(place.samples, k))
            own = [part(value, k * rows) for value in args]
            named = {name: part(value, k * rows) for name, value in kwargs.items()}
            made.narrow(dim, k * rows, rows).copy_(func(*own, **named))

    def _seed_for(
        self, made: Tensor, number: int, mini_batch: tuple[int, ...], sample: int | None
    ) -> None:
        seed = _seed("numbers", self._own, number, mini_batch, sample)
        torch.default_generator.manual_seed(seed)
        if made.is_cuda:
            torch.cuda.default_generators[made.get_device()].manual_seed(seed)


def same_numbers(calls: RandomCalls | None, seed: int) -> SameNumbers | None:
    """Where something is drawn, and it is known what."""
    return SameNumbers(calls, seed) if calls is not None and calls.calls else None


def _is_random(func: Any) -> bool:
    return (
        torch.Tag.nondeterministic_seeded in func.tags and func.overloadpacket.__name__ in _RANDOM
    )


def _at(samples: range, k: int) -> int:
    """The k-th sample; behind the last, where a micro-batch is filled up, numbers go on."""
    return samples[k] if k < len(samples) else samples.start + k * samples.step


def _seed(*of: Any) -> int:
    digest = hashlib.blake2b(repr(of).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
