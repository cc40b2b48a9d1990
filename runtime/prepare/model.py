"""The model cut into the plan's stages, with its parameters' names and who owns them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from ...profiles.autograd.dropout import BATCH_NORMS
from ...profiles.errors import TargetError
from ...profiles.tracing.graph import GraphBody, graph_of, hidden_matrices
from ...profiles.tracing.pieces import Piece, cut
from .devices import Modes
from .distribution import Specs
from .loss import LossKind
from .tied_parameters import Ties, first_names, model_parameters, same_tensors, state_of
from .traced_task import OtherModes, TracedTask

T = TypeVar("T")


@dataclass(frozen=True)
class PreparedStage:
    """A stage's piece of the model.

    Attributes:
        piece: for training.
        evaluation_piece: the same in evaluation mode; the two share parameters and leaf modules.
            None where nothing is evaluated.
        specs: of every value that layers take from each other, for a replica's micro-batch.
    """

    piece: Piece
    evaluation_piece: Piece | None
    specs: Specs

    @property
    def modules(self) -> list[GraphBody]:
        """Of its pieces."""
        pieces = (self.piece, self.evaluation_piece)
        return [piece.module for piece in pieces if piece is not None]


@dataclass(frozen=True)
class PreparedModel:
    """The model's pieces, one for each stage, with their parameters' names.

    Attributes:
        inputs: names of the model's own inputs, one for each tensor.
        arguments: names of its arguments, each a tensor or a nest of them; None for one that goes
            by position.
        names: for each name of a parameter, the first that the model has for it.
        saved: for each name of the model's state, the one under which its state_dict has it.
        whole: the model as the task has built it.
        ties: parameters that several stages use.
        unused: parameters and buffers of the model that no stage uses, under its names.
        matrices: names of the parameters that are matrices of hidden layers (Muon's).
        loss: what the task's loss gives.
        autocast: dtype of torch.autocast for the forwards; None: off.
        modes: modules that stay in the other mode.
    """

    stages: tuple[PreparedStage, ...]
    inputs: tuple[str, ...]
    arguments: tuple[str | None, ...]
    names: Mapping[str, str]
    saved: Mapping[str, str]
    whole: nn.Module
    ties: Ties
    unused: Mapping[str, Tensor]
    matrices: frozenset[str]
    loss: LossKind
    autocast: torch.dtype | None
    modes: OtherModes

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Those of all stages, for training."""
        return tuple(stage.piece for stage in self.stages)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Of the whole model, under the first names that it has for them."""
        return dict(self.whole.named_parameters())

    @property
    def has_statistics(self) -> bool:
        """Whether something in it has running statistics, as batch norms do."""
        nodes = (node for piece in self.pieces for node in graph_of(piece.module).nodes)
        return any(name.endswith("running_mean") for name, _ in self.whole.named_buffers()) or any(
            node.target in BATCH_NORMS for node in nodes
        )

    @property
    def first_written(self) -> dict[str, str]:
        """`names`, by those of its state_dict."""
        return {self.saved.get(n, n): self.saved.get(f, f) for n, f in self.names.items()}

    def as_named(self, written: Mapping[str, T]) -> dict[str, T]:
        """What goes by the names of its state_dict, by the model's."""
        names = {other: name for name, other in self.saved.items()}
        return {names.get(name, name): value for name, value in written.items()}

    def owned_elsewhere(self, stage: int) -> frozenset[int]:
        """Ids of parameters that a stage uses and another one of its device owns."""
        return frozenset(
            id(p)
            for one in (*self.ties.shared, *self.ties.frozen)
            if stage in one.stages and stage != one.owner
            for p in one.of(one.owner, self.stages[one.owner].piece.module)
        )

    def owned_by(self, stage: int) -> list[tuple[str, nn.Parameter]]:
        """A stage's parameters but for those, trained or not, under the first names that the model
        has for them: copies go by one name, so that parameter groups treat them alike."""
        module, elsewhere = self.stages[stage].piece.module, self.owned_elsewhere(stage)
        return [(n, p) for n, p in model_parameters(module, self.names) if id(p) not in elsewhere]

    def state(self, stage: int) -> dict[str, Tensor]:
        """A stage's parameters and buffers under the names of the model's state_dict, tied ones
        under each; the first stage's with those that no stage uses.

        Without those that another stage of the worker updates, and has.
        """
        elsewhere = self.names_elsewhere(stage)
        own = state_of(self.stages[stage].piece.module)
        state = {name: tensor for name, tensor in own.items() if name not in elsewhere}
        first = {self.names.get(name, name): tensor for name, tensor in state.items()}
        for name, known_as in self.names.items():
            if known_as in first:
                state.setdefault(name, first[known_as])
        state |= {} if stage else self.unused
        return {self.saved.get(name, name): tensor for name, tensor in state.items()}

    def tied_names(self, stage: int) -> dict[str, str]:
        """Of the names in `state`, those that stand for what an earlier name of the model does, and
        that name; none where hooks change names, since safetensors knows nothing of these."""
        if self.first_written.keys() != self.names.keys():
            return {}
        return same_tensors(self.state(stage), self.names)

    def names_elsewhere(self, stage: int) -> frozenset[str]:
        """Of parameters that another stage of the worker owns, as the piece calls them."""
        elsewhere = self.owned_elsewhere(stage)
        if not elsewhere:
            return frozenset()
        named = self.stages[stage].piece.module.named_parameters(remove_duplicate=False)
        return frozenset(name for name, p in named if id(p) in elsewhere)

    def updated_by(self, stage: int) -> list[tuple[str, nn.Parameter]]:
        """Of those, the ones that are trained."""
        return [(name, p) for name, p in self.owned_by(stage) if p.requires_grad]


def stages_of(
    traced: TracedTask,
    groups: Sequence[Sequence[int]],
    samples: Sequence[int],
    specs: Mapping[int, Specs],
    saved: Collection[str],
) -> list[PreparedStage]:
    """The model cut into stages. `saved`: names of its state. Raises as `cut`, `_check_state`."""
    pieces = {n: cut(graph, groups) for n, graph in traced.training.items()}
    chosen = [pieces[n][s] for s, n in enumerate(samples)]
    evaluated = cut(traced.evaluation, groups) if traced.evaluation else [None] * len(chosen)
    for piece in chosen:
        _leave_out_of_state(piece.module, saved)
        _check_state(piece)
    return [
        PreparedStage(piece, other, specs[n])
        for piece, other, n in zip(chosen, evaluated, samples, strict=True)
    ]


def model_of(
    traced: TracedTask,
    stages: Sequence[PreparedStage],
    ties: Ties,
    saved: Mapping[str, str],
    matrices: frozenset[str],
    loss: LossKind,
    modes: Modes,
) -> PreparedModel:
    """The whole model, cut into these stages."""
    model, graph = traced.model, next(iter(traced.training.values()))
    names = first_names(model)
    used = {names.get(name, name) for s in stages for name in state_of(s.piece.module)}
    return PreparedModel(
        stages=tuple(stages),
        inputs=tuple(node.name for node in graph.inputs),
        arguments=traced.arguments,
        names=names,
        saved=saved,
        whole=model,
        ties=ties,
        unused={
            name: tensor
            for name, tensor in state_of(model).items()
            if names.get(name, name) not in used and isinstance(tensor, Tensor)
        },
        matrices=matrices,
        loss=loss,
        autocast=modes.autocast,
        modes=traced.modes,
    )


def matrices_of(traced: TracedTask, samples: int) -> frozenset[str]:
    """Names of the parameters that are matrices of hidden layers."""
    hidden = {id(p) for p in hidden_matrices(traced.training[samples], traced.model)}
    return frozenset(name for name, p in traced.model.named_parameters() if id(p) in hidden)


def _leave_out_of_state(module: nn.Module, saved: Collection[str]) -> None:
    """Leave buffers out of its state that aren't in the model's: a graph has forgotten which are
    `persistent`, and holds the trace's constants as some more."""
    for path, inner in module.named_modules():
        for name, _ in inner.named_buffers(recurse=False, remove_duplicate=False):
            if f"{path}.{name}".lstrip(".") not in saved:
                inner._non_persistent_buffers_set.add(name)


def _check_state(piece: Piece) -> None:
    """Raise TargetError where a module has state that checkpoints can't hold."""
    for name, value in (*state_of(piece.module).items(), *piece.module.named_buffers()):
        if not isinstance(value, Tensor):
            raise TargetError(
                f"the model's state {name!r} is no tensor but {type(value).__name__} "
                "(get_extra_state): checkpoints hold tensors alone; return one, or keep it in a "
                "buffer"
            )
        if value.dtype == torch.complex128:
            raise TargetError(
                f"the model's state {name!r} is of torch.complex128, which checkpoints can't hold: "
                "make it torch.complex64, or hold it as numbers (torch.view_as_real)"
            )
