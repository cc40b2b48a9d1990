"""A stage's messages: activations received and sent, and their gradients.

What stages of one worker give each other are their own tensors, without a copy (`HandedOver`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...planner.systems.operations import BACKWARD, FORWARD
from ...profiles.autograd.boundary import storage_key
from ..communication.channel import Channels
from ..prepare.messages import (
    MessageRoute,
    MessageSeries,
    by_name,
    join,
    message_series,
    missing_gradients,
)
from ..prepare.prepared import Prepared
from ..prepare.workers import Replica
from ..records.operation_log import OperationLog
from ..weights.in_place import ChangedInPlace
from .micro_batch import OutputGradients


class StageMessages:
    """Receives and sends a replica's activations and gradients, over its channels.

    Attributes:
        channels: of its worker.
        transport, not_by_ipc: how messages go, and why not from GPU to GPU; for the report.
        sent_bytes: to other workers, so far.
    """

    def __init__(
        self,
        prepared: Prepared,
        replica: Replica,
        channels: Channels,
        log: OperationLog | None = None,
    ) -> None:
        """`log`: notes messages of training between workers."""
        distribution, variant = prepared.distribution, prepared.pipeline.variant
        self.channels, self._log = channels, log
        self.transport = self.not_by_ipc = ""
        self.sent_bytes = 0
        self._replica = replica
        self._mine = distribution.shares[replica.number].micro_batches
        self._whole = variant.backward_unit == "mini"
        self._known = distribution.known[replica.stage]
        self._incoming = by_name(c for c in distribution.routes if c.target == replica)
        self._outgoing = [c for c in distribution.routes if c.source == replica]
        # By micro-batch.
        self._taken = {i: [self._for(i, cs) for cs in self._incoming.values()] for i in self._mine}
        self._made = {i: self._for(i, self._outgoing) for i in self._mine}
        self._evaluation = distribution.evaluation_routes
        returning = Counter(c.spec.name for c in self._outgoing if c.spec.needs_grad)
        self._summed = {name for name, count in returning.items() if count > 1}
        self._in_parts = {c.spec.name for c in self._outgoing if c.taken is not None}

    @staticmethod
    def _for(micro_batch: int, routes: Iterable[MessageRoute]) -> list[MessageRoute]:
        return [c for c in routes if micro_batch in c.micro_batches]

    def series(self, mini_batches: int) -> list[MessageSeries]:
        """All messages of a segment with so many mini-batches."""
        series = []
        for routes in self._incoming.values():
            steps = [self._for(i, routes) for i in self._mine]
            series.append(message_series(FORWARD, steps, mini_batches))
        back: dict[tuple[str, int], list[MessageRoute]] = {}
        for c in self._outgoing:
            if c.spec.needs_grad:
                back.setdefault((c.spec.name, c.target.stage), []).append(c)
        for routes in back.values():
            steps = [self._for(i, routes) for i in self._mine]
            steps = [routes] if self._whole else steps
            series.append(message_series(BACKWARD, steps, mini_batches))
        return series

    def evaluation_series(self, count: int) -> list[MessageSeries]:
        """All messages of an evaluation with so many micro-batches."""
        return [message_series(FORWARD, [[c]], count) for c in self._evaluated()]

    def _evaluated(self) -> list[MessageRoute]:
        return [c for c in self._evaluation if c.target == self._replica]

    def handed_over(
        self, kept: Mapping[int, Callable[[], Collection[str]]]
    ) -> tuple[HandedOver, HandedOver]:
        """What comes from other stages of the worker, in training and in evaluation.

        Args:
            kept: by stage, what tells which of its outputs it keeps for its backward.
        """

        def of(routes: Iterable[MessageRoute]) -> HandedOver:
            return HandedOver({c.spec.name: kept[c.source.stage] for c in routes if c.handed_over})

        training = of(c for routes in self._incoming.values() for c in routes)
        return training, of(self._evaluated())

    # Training --------------------------------------------------------------------------------

    def inputs(self, micro_batch: int) -> dict[str, Tensor]:
        """Receive what a forward takes from other stages, by name; with what is known before the
        run."""
        found = {}
        for routes in self._taken[micro_batch]:
            received = [(c, self._receive(c, FORWARD)) for c in routes]
            found[routes[0].spec.name] = join(received)
        found.update(self._known)
        return found

    def send_outputs(
        self,
        micro_batch: int,
        outputs: Mapping[str, Tensor],
        kept: Collection[str],
        lasts: Callable[[Tensor], bool],
    ) -> None:
        """Send what a forward has made.

        Args:
            kept: outputs that the stage keeps for its backward anyway.
            lasts: whether a tensor's memory is one that changes later on.
        """
        for c in self._made[micro_batch]:
            made = outputs[c.spec.name]
            part = made if c.taken is None else c.taken.of(made)
            if lasts(part):
                part = part.clone()
            self._send(c, FORWARD, part, kept=c.spec.name in kept)

    def output_gradients(
        self, mine: Sequence[int], made_shape: Callable[[str], torch.Size]
    ) -> OutputGradients:
        """Receive the gradients of outputs, summed over the stages that use them.

        Args:
            mine: micro-batches of the backward.
            made_shape: of an output, in the forward.
        """
        grads: dict[str, Tensor] = {}
        for c in self._outgoing:
            if c.spec.needs_grad and not set(mine).isdisjoint(c.micro_batches):
                name = c.spec.name
                message = self._receive(c, BACKWARD)
                if c.handed_over and name in self._summed:
                    # Others may have the same memory, and this is going to be added to.
                    message = message.clone()
                grads[name] = c.add_gradient(grads.get(name), message, mine, made_shape(name))
        gone = {n: missing_gradients(g, in_parts=n in self._in_parts) for n, g in grads.items()}
        return OutputGradients(grads, gone)

    def send_gradients(self, mine: Sequence[int], back: Mapping[str, Tensor]) -> None:
        """Send the gradients of inputs (`Stage.backward`)."""
        for routes in self._incoming.values():
            for c in routes:
                if c.spec.needs_grad and not set(mine).isdisjoint(c.micro_batches):
                    self._send(c, BACKWARD, c.gradient_part(back[c.spec.name], mine))

    def _send(self, c: MessageRoute, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        self.channels.send(c, kind, tensor, kept=kept)
        if c.handed_over:
            return
        self.sent_bytes += tensor.nbytes
        if self._log is not None and self._log.on:
            self._log.message("sent", c.between(kind)[1].number, c.spec.name, tensor)

    def _receive(self, c: MessageRoute, kind: str) -> Tensor:
        tensor = self.channels.receive(c, kind)
        if self._log is not None and self._log.on and not c.handed_over:
            self._log.message("received", c.between(kind)[0].number, c.spec.name, tensor)
        return tensor

    # Evaluation ------------------------------------------------------------------------------

    def evaluation_inputs(self) -> dict[str, Tensor]:
        """Receive what a forward of an evaluation takes from other stages."""
        return {c.spec.name: self.channels.receive(c, FORWARD) for c in self._evaluated()}

    def send_evaluated(self, outputs: Mapping[str, Tensor]) -> None:
        """Send what it has made."""
        for c in self._evaluation:
            if c.source == self._replica:
                self.channels.send(c, FORWARD, outputs[c.spec.name])


class HandedOver:
    """Inputs that another stage of the same worker hands over as they are, without a message."""

    def __init__(self, makers: Mapping[str, Callable[[], Collection[str]]] | None = None) -> None:
        """
        Args:
            makers: by the input's name, what tells which of its outputs the stage that makes it
                keeps for its backward.
        """
        self._makers = makers or {}
        self._changed = ChangedInPlace[str](
            "{!r} is changed in place, and wasn't in the first run: another stage of this device "
            "may need it as it was; make the operation one that isn't in place, or plan with "
            "--stages-per-device 1"
        )

    def safe(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Values for a first run of the piece, with copies of what it may change."""
        if not self._makers:
            return values
        copied = {name for name in self._makers if name in self._changed}
        return {name: v.clone() if name in copied else v for name, v in values.items()}

    def watch(self, names: Iterable[str], arguments: Iterable[Any]) -> dict[str, Tensor]:
        """Before the piece gets these arguments. Returns those that are handed over."""
        if not self._makers:
            return {}
        pairs = zip(names, arguments, strict=True)
        watched = {n: v for n, v in pairs if n in self._makers and isinstance(v, Tensor)}
        self._changed.begin(watched.items())
        return watched

    def check(self) -> None:
        """The piece has run. Raises RunError where it has changed what it hadn't before."""
        if self._makers:
            self._changed.end()

    def kept_elsewhere(self, names: Iterable[str]) -> set[str]:
        """Of these inputs, those whose memory the stage that made them keeps anyway."""
        return {
            name
            for name in names
            if name in self._makers
            and name in self._makers[name]()
            and name not in (self._changed.known or ())
        }

    def storages_kept_elsewhere(self, watched: Mapping[str, Tensor]) -> set[int]:
        """Their memory, by key."""
        return {storage_key(watched[name]) for name in self.kept_elsewhere(watched)}
