"""Hooks of a stage's training: one protocol for all that takes part in it beside forward, backward
and optimizer step; and a chain of them, which is hooks again, as optax chains its transformations.

Corrections of weights, batch-norm statistics, ties and measurements of staleness are each such an
object, and so are the rules of a system from outside. Which ones a stage has, the system's row
and the run's settings say. Order of the calls, for each mini-batch:

    begin                                      once a segment, while the pipeline is empty
    forward, after_forward                     each micro-batch
    before_backward, backward, after_backward  each backward, and each weight part of a split one
    due, before_update, rate, after_update     each update

Times are counted in updates, mini-batches from the segment's first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from .operations import Op

if TYPE_CHECKING:
    from torch import Tensor, nn

NOTHING: AbstractContextManager[Any] = nullcontext()
"""The context of a pass that no hook has one for."""


class ForwardRun(NamedTuple):
    """A micro-batch's forward at a stage.

    Attributes:
        version, latest: numbers of the weight version that it uses, and of the stage's latest.
        weights: what it runs on, by the stage's parameters; None: the parameters as they are.
        real: samples of the micro-batch, in front of its padding.
        size: samples with padding.
    """

    op: Op
    version: int
    latest: int
    weights: Sequence[Tensor] | None
    real: int
    size: int


class BackwardRun(NamedTuple):
    """A backward's pass over those micro-batches that it runs on the same weights.

    Attributes:
        difference: the operation's version difference: between the version that it uses and the
            oldest that its forwards used.
        version, latest: that this pass counts as using, and the stage's latest.
        weights: what it runs on; None: the parameters as they are.
        first: the operation's first pass.
    """

    op: Op
    difference: int
    version: int
    latest: int
    weights: Sequence[Tensor] | None
    first: bool


class StageHooks:
    """What takes part in the training of a stage's replica. Here, nothing does.

    Attributes:
        makes: the value of `Variant.forward_weights` or `backward_weights` for which this writes
            the weights; empty: it writes none.
        kept: state by a name, per parameter of the stage: checkpoints have it, and its bytes count
            with the weight versions.
    """

    makes: str = ""
    kept: Mapping[str, MutableMapping[nn.Parameter, Tensor]] = MappingProxyType({})

    def begin(self, first: int, mini_batches: int) -> None:
        """A segment of the run begins, on an empty pipeline.

        Args:
            first: number of its first mini-batch in the run.
            mini_batches: how many it has.
        """

    # Passes ------------------------------------------------------------------------------------

    def forward(self, run: ForwardRun) -> AbstractContextManager[Any] | None:
        """A forward is about to run. Returns the context to run it in; None: as it is."""

    def recompute(self, op: Op) -> AbstractContextManager[Any] | None:
        """The context for the second forward of some of its layers, before a backward."""

    def after_forward(self, op: Op) -> None:
        """A forward is done, by this replica or by another one of the stage."""

    def before_backward(self, op: Op) -> None:
        """A backward, or the weight part of a split one, is about to run: its messages are there.

        Not counted as the stage's computation: it may wait for other workers.
        """

    def backward(self, run: BackwardRun) -> None:
        """A pass of a backward has run."""

    def after_backward(self, op: Op) -> None:
        """A backward is done: its gradients have been added to those of the parameters."""

    # Updates -----------------------------------------------------------------------------------

    def due(self, mini_batch: int) -> None:
        """An update is due: this mini-batch's backwards, and all before, are done on this replica.

        Sums over replicas and clipping come after this.
        """

    def before_update(self) -> None:
        """The optimizer is about to step; gradients are there, none where it leaves this out."""

    def rate(self, update: int) -> float:
        """Factor on the learning rate of an update, counted from 0."""
        return 1.0

    def after_update(self) -> None:
        """It has stepped."""

    # Weights -----------------------------------------------------------------------------------

    def forward_weights(self, updates: int, into: Mapping[nn.Parameter, Tensor]) -> None:
        """Write the weights of a pass that aims at a later version (`makes`).

        Args:
            updates: how far ahead of the latest version, above 0, as the row's `horizon` counts.
            into: a tensor for each parameter.
        """
        raise NotImplementedError

    def backward_weights(self, updates: int, into: Mapping[nn.Parameter, Tensor]) -> None:
        """Write the weights of a backward (`makes`).

        Args:
            updates: made since its forward, above 0; without any it runs on the latest weights.
            into: a tensor for each parameter.
        """
        raise NotImplementedError


HOOKS = tuple(name for name, hook in vars(StageHooks).items() if callable(hook))
"""Their names."""


def overrides(hooks: StageHooks, name: str) -> bool:
    return getattr(getattr(hooks, name), "__func__", None) is not getattr(StageHooks, name)


def _each(name: str) -> Any:
    """The method of a chain that calls this hook of each."""

    def call(self: HookChain, *arguments: Any) -> None:
        for hook in self.calls[name]:
            hook(*arguments)

    return call


def _contexts(name: str) -> Any:
    """The method of a chain that gives the contexts of each, the first one's outermost."""

    def call(self: HookChain, given: Any) -> AbstractContextManager[Any]:
        some = [context for hook in self.calls[name] if (context := hook(given)) is not None]
        if len(some) < 2:
            return some[0] if some else NOTHING
        return _nested(some)

    return call


class HookChain(StageHooks):
    """Hooks that are called one after another.

    Attributes:
        hooks: all of them.
        calls: by the hook's name, those that do something.
    """

    def __init__(self, hooks: Iterable[StageHooks]) -> None:
        self.hooks: list[StageHooks] = []
        self.calls: dict[str, list[Callable[..., Any]]] = {}
        self.insert(*hooks)

    def insert(self, *hooks: StageHooks) -> None:
        """Have these called before all others."""
        self.hooks = [*hooks, *self.hooks]
        self.calls = {
            name: [getattr(each, name) for each in self.hooks if overrides(each, name)]
            for name in HOOKS
        }

    def making(self, weights: str) -> StageHooks | None:
        """Those that write what a row calls so; None: nobody does."""
        return next((each for each in self.hooks if each.makes == weights), None)

    def states(self) -> list[tuple[str, MutableMapping[nn.Parameter, Tensor]]]:
        """All that is kept, with its name."""
        return [item for each in self.hooks if each.kept for item in each.kept.items()]

    begin = _each("begin")
    after_forward = _each("after_forward")
    before_backward = _each("before_backward")
    backward = _each("backward")
    after_backward = _each("after_backward")
    due = _each("due")
    before_update = _each("before_update")
    after_update = _each("after_update")

    forward = _contexts("forward")
    recompute = _contexts("recompute")

    def rate(self, update: int) -> float:
        """The product of all factors."""
        return math.prod([hook(update) for hook in self.calls["rate"]], start=1.0)


@contextmanager
def _nested(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
