"""A task with its model's graphs, and what running them on its samples shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ...profiles.autograd.dropout import WithoutDropout
from ...profiles.autograd.random_numbers import RandomCalls, random_calls
from ...profiles.errors import PlanError
from ...profiles.profile import VaryingShapes
from ...profiles.target import Target
from ...profiles.tasks.hooks import in_one_line
from ...profiles.tasks.loss_parts import own_copy
from ...profiles.tasks.shapes import at_profiled
from ...profiles.tasks.task import Task
from ...profiles.tracing.call import Call, unchanged, without_data
from ...profiles.tracing.graph import TracedModel
from ...profiles.tracing.pieces import take_apart
from ...profiles.tracing.random_states import seed_everywhere
from ...profiles.tracing.shapes import ValueSpec, rewritten_by, run_node_by_node, specs_and_result
from ...profiles.tracing.verify import all_same


@dataclass(frozen=True)
class ForwardLook:
    """Results and shapes of one forward of some number of samples.

    Attributes:
        specs: of what layers take from each other; where mini-batches differ in shape, in one of
            those shapes that were profiled.
        result: the model's, of fake tensors where it ran on such.
        target: that belongs to it.
    """

    specs: Mapping[str, ValueSpec]
    result: Any
    target: Any

    @property
    def result_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors in the result."""
        return [tuple(tensor.shape) for tensor in tensors_in(self.result)]


def tensors_in(result: Any) -> list[Tensor]:
    """Those of a model's result."""
    return [leaf for leaf in take_apart(result)[0] if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class OtherModes:
    """Modules that a model's own `train` leaves in the other mode, as where batch norms are frozen.

    Attributes:
        training: names of those in evaluation mode while the model is trained.
        evaluation: names of those in training mode while it is evaluated.
    """

    training: frozenset[str] = frozenset()
    evaluation: frozenset[str] = frozenset()

    def set(self, module: nn.Module, *, training: bool) -> None:
        """Set a piece's mode; it has the model's modules, but not what holds them."""
        module.train(training)
        names = self.training if training else self.evaluation
        for name, inner in module.named_modules(remove_duplicate=False) if names else ():
            if name in names:
                inner.training = not training


@dataclass(frozen=True)
class TracedTask:
    """The model's graphs, one for each micro-batch size, with the same layers in all.

    Attributes:
        model: that was traced, in training mode.
        training: by number of samples.
        evaluation: in evaluation mode: tracing fixes what depends on `self.training`; None where
            nothing is evaluated.
        fake: forwards run on fake tensors.
        varying: shapes of mini-batches, where they aren't all alike.
        arguments: names of the model's arguments, None for one that goes by position.
        modes: which modules the model's own train() and eval() leave in the other mode.
    """

    target: Target
    task: Task
    model: nn.Module
    training: Mapping[int, TracedModel]
    evaluation: TracedModel | None
    fake: bool
    arguments: tuple[str | None, ...]
    varying: VaryingShapes | msgspec.UnsetType
    modes: OtherModes

    def look(self, samples: int, graph: TracedModel | None = None) -> ForwardLook:
        """Run the model on so many samples, by a graph of `training`, by default that of so many.
        Raises TargetError where it fails, TraceError where what a layer gives can't cross a cut."""
        graph = graph or self.training[samples]
        call, wanted = self.target.call(samples)
        with in_one_line(f"{self.target.name}: the model failed on its own inputs"):
            specs, result = specs_and_result(graph, call.tensors, fake=self.fake)
            if self.varying is not msgspec.UNSET:
                profiled = at_profiled(call, self.varying).tensors
                specs, _ = specs_and_result(graph, profiled, fake=self.fake)
        for node in graph.inputs:
            specs.pop(node.name, None)
        return ForwardLook(specs, result, wanted)

    def check_without_gradients(self, samples: int) -> None:
        """Check that a forward of so many samples does the same without gradients, as the first run
        of what is computed again has none.

        Raises PlanError.
        """
        module, results = self.training[samples].module, list[Sequence[Any]]()
        tensors = self.target.call(samples)[0].tensors
        for grad in (True, False):
            with unchanged(module), torch.set_grad_enabled(grad):
                seed_everywhere(0)
                results.append(take_apart(module(*[t.clone() for t in tensors]))[0])
        if not all_same(*results):
            raise PlanError(
                f"plan: the forward of {self.target.name} asks whether gradients are on "
                "(torch.is_grad_enabled), and does something else without them: what is computed "
                "again is run without first; plan without --recompute"
            )

    def rewritten(self, samples: int) -> frozenset[int]:
        """Storages of the parameters that aren't trained and that a forward of so many samples
        changes. Call it where `look` was successful."""
        graph = self.training[samples]
        return rewritten_by(graph, self.target.call(samples)[0].tensors, fake=self.fake)

    def random_calls(
        self, samples: int, mini_batch: int, groups: Sequence[Sequence[int]]
    ) -> RandomCalls | None:
        """What draws random numbers in training, dropout left out.

        Args:
            samples: in a micro-batch.
            groups: the layers of each stage.

        Returns None where it can't be told which stage draws what.
        """
        graph, sizes = self.training[samples], (samples, mini_batch)
        looking = without_data(self.model) if self.fake else unchanged(self.model)

        def inputs(call: Call, mode: Any) -> list[Tensor]:
            given = at_profiled(call, self.varying).tensors
            return [t.clone() if mode is None else mode.from_tensor(t) for t in given]

        calls = {n: self.target.call(n) for n in sizes}

        def loss(n: int, result: Any) -> None:
            with suppress(Exception):  # the user's code
                own_copy(self.task).loss(result, calls[n][1])

        names = [{node.name for k in group for node in graph.layers[k].nodes} for group in groups]
        names[-1].update(node.name for node in graph.packing())
        try:
            with looking as mode, torch.no_grad(), WithoutDropout():
                return random_calls(
                    lambda n: calls[n][0].of(self.model, inputs(calls[n][0], mode)),
                    loss,
                    sizes,
                    partial(run_node_by_node, graph, inputs(calls[samples][0], mode)),
                    names,
                )
        except Exception:  # the user's model, or an operation without a fake form
            return None

    def flops_per_sample(self, samples: int) -> float | None:
        """Floating-point operations of a forward, of so many samples, for each of them; as
        torch.utils.flop_counter has it: of matrix products, convolutions and attention, a
        multiply-add being two. None: they can't be counted, or there are none."""
        from torch.utils.flop_counter import FlopCounterMode

        graph = self.training[samples]
        call, _ = self.target.call(samples)
        try:
            # The other way round, the cache of fake tensors would hide operations.
            with without_data(graph.module) as mode:
                given = [mode.from_tensor(tensor) for tensor in call.tensors]
                with FlopCounterMode(display=False) as counter:
                    graph.module(*given)
        except Exception:  # an operation without a fake form, of whatever library
            return None
        return counter.get_total_flops() / samples or None
