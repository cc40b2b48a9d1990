"""Stages under torch.compile: their forward, and why some stages can't be compiled.

The compiler may compute activations again in the backward instead of keeping them. Where that
backward runs on other weights than its forward, it would compute them on the wrong ones: there the
graph is parted as autograd would part it (`_Kept`). What the compiled forward saves of its
weights are references to them, as ever (`weights.stash`).
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from ...profiles.tasks.hooks import describe_error
from ..prepare.prepared import Prepared

OPTIONS: dict[str, Any] = {
    # Dropout draws what it draws without compiling.
    "fallback_random": True,
    # A pool of processes for a few kernels takes longer to start than they take.
    "compile_threads": 1,
}
"""Of torch's inductor."""

_LATER_WEIGHTS: dict[str, Any] = {
    # A convolution's weight in another layout is a copy of it, which would be kept.
    "layout_optimization": False,
}
"""Besides, where a backward runs on other weights than its forward."""

_MOST = 200
"""Characters of what a compiler says, which may be pages."""


def why_not(prepared: Prepared, stage: int) -> str:
    """Why a stage can't be compiled, as plan and settings say; empty: nothing is in the way."""
    variant, settings = prepared.pipeline.variant, prepared.settings
    if variant.split_backward:
        return f"{variant.name} splits backwards in two, and compiled ones are one piece"
    if prepared.model.autocast is not None and not same_weights(prepared):
        return (
            "autocast: of weights in its precision a compiled forward keeps copies, and "
            f"{variant.name} runs the backward on others"
        )
    if prepared.plan.stages[stage].recomputed:
        return "some of its layers are computed again, which a compiled forward can't tell apart"
    norms = (nn.modules.batchnorm._BatchNorm,)
    modules = prepared.model.stages[stage].piece.module.modules()
    if settings.deferred_batch_norm and any(isinstance(m, norms) for m in modules):
        return "its batch norms are deferred (--deferred-batch-norm)"
    return ""


def same_weights(prepared: Prepared) -> bool:
    """Whether every backward runs on the weights of its forward."""
    variant = prepared.pipeline.variant
    return variant.flushes or variant.backward_weights == "forward"


def forward_of(prepared: Prepared, stage: int, module: nn.Module) -> StageForward:
    """The forward of a stage's module in training, compiled where that is asked for and can be."""
    if not prepared.settings.compile:
        return StageForward(module)
    found = StageForward(module, why_not(prepared, stage))
    if not found.why_not:
        found.compile(recomputes=same_weights(prepared))
    return found


class StageForward:
    """A stage's forward, compiled at its first call where that was asked for.

    Attributes:
        why_not: why it isn't compiled, where it was to be; empty: it is, or wasn't to be.
    """

    def __init__(self, module: nn.Module, why_not: str = "") -> None:
        self.module = module
        self.why_not = why_not
        self._compiled: Callable[..., Any] | None = None

    def compile(self, *, recomputes: bool) -> None:
        """Have it compiled. `recomputes`: its backward may compute activations again."""
        # Threads that ask for these at once, as the compiler's may, get a part of them (CPython
        # fills its table in place).
        sysconfig.get_config_vars()
        try:
            options = dict(OPTIONS)
            if not recomputes:
                options |= {**_LATER_WEIGHTS, "custom_partitioner_fn": _kept()}
            self._compiled = torch.compile(self.module, fullgraph=True, options=options)
        except Exception as error:  # of a torch that doesn't know these options
            self._leave(error)

    def __call__(self, *arguments: Any) -> Any:
        """The module's outputs. Raises whatever the module raises."""
        if self._compiled is None:
            return self.module(*arguments)
        try:
            return self._compiled(*arguments)
        except Exception as error:  # the compiler's, of whatever kind
            # Should it be the module's own, it comes again here.
            found = self.module(*arguments)
            self._leave(error)
            return found

    def _leave(self, error: Exception) -> None:
        self._compiled = None
        self.why_not = shorten(describe_error(error), _MOST, placeholder=" …")


def _kept() -> Any:
    """A partitioner by which the forward keeps what autograd would."""
    from torch._functorch.partitioners import default_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Kept(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **more: Any) -> Any:
            more.pop("compiler", None)
            forward, backward = default_partition(gm, joint_inputs, **more)
            # What it draws at random for nobody: the partitioner leaves the forward's draws in both
            # graphs, and the next forward's would be others than without compiling.
            for node in reversed(backward.graph.nodes):
                tags = getattr(node.target, "tags", ())
                if not node.users and torch.Tag.nondeterministic_seeded in tags:
                    backward.graph.erase_node(node)
            backward.recompile()
            return forward, backward

        def uuid(self) -> str:
            return "timeprest: what autograd keeps, drawn once"

        def __reduce__(self) -> tuple[Any, ...]:
            # Part of the key under which kernels are found again.
            return _kept, ()

    return Kept()
