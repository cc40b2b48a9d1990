"""Parameters that several stages use: each of the stages gets a copy of its own.

Their gradients are summed over the stages before every update, so that copies which start alike and
have optimizers alike stay alike, bit by bit.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from ...profiles.tracing.graph import fetch_attribute


@dataclass(frozen=True)
class TiedParameters:
    """Parameters that the same stages hold copies of.

    Attributes:
        stages: ascending.
        names: per stage, of its copies in its own piece; the same sequence at every stage.
    """

    stages: tuple[int, ...]
    names: Mapping[int, tuple[str, ...]]

    @property
    def group(self) -> str:
        """What messages call those who sum the gradients."""
        return f"tied stages {', '.join(map(str, self.stages))}"

    def of(self, stage: int, module: nn.Module) -> list[nn.Parameter]:
        """The copies in a stage's piece, or in a replica of it."""
        named = dict(module.named_parameters())
        return [named[name] for name in self.names[stage]]

    def counts_in(self, stage: int) -> bool:
        """Whether it is here that they count, where something is summed over the model."""
        return stage == self.stages[0]


def give_copies(stages: Sequence[Sequence[fx.GraphModule]]) -> tuple[TiedParameters, ...]:
    """Replace what is used on an earlier stage too by copies, in place.

    Args:
        stages: per stage, its pieces in all modes, which share their parameters.
    """
    holders: dict[int, list[int]] = {}
    shared: dict[int, nn.Parameter] = {}
    for s, modules in enumerate(stages):
        for p in _parameters(modules):
            holders.setdefault(id(p), []).append(s)
            shared[id(p)] = p
    tied = {key: tuple(held) for key, held in holders.items() if len(held) > 1}
    found: dict[tuple[int, ...], dict[int, list[str]]] = {}
    for key, held in tied.items():
        by_stage = found.setdefault(held, {s: [] for s in held})
        for s in held:
            names = {id(p): name for name, p in stages[s][0].named_parameters()}
            by_stage[s].append(names[key])
    for s, modules in enumerate(stages):
        moved = {
            key: nn.Parameter(shared[key].detach().clone(), shared[key].requires_grad)
            for key, held in tied.items()
            if s in held[1:]
        }
        leaves: dict[int, nn.Module] = {}
        for module in modules if moved else ():
            _replace(module, moved, leaves)
    return tuple(
        TiedParameters(held, {s: tuple(names) for s, names in by_stage.items()})
        for held, by_stage in found.items()
    )


def first_names(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter, the first name that the model has for it."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(p), name)
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def model_parameters(module: nn.Module, names: Mapping[str, str]) -> list[tuple[str, nn.Parameter]]:
    """A module's parameters, each with the first name that the whole model has for it.

    Args:
        names: for each name, the first (`first_names`): copies go by one name.
    """
    return [(names.get(name, name), p) for name, p in module.named_parameters()]


def _parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return list({id(p): p for module in modules for p in module.parameters()}.values())


def _replace(
    module: fx.GraphModule, moved: Mapping[int, nn.Parameter], leaves: dict[int, nn.Module]
) -> None:
    """Put copies in the places of parameters, without touching modules that others use too.

    Args:
        moved: copies, by the id of what they replace.
        leaves: modules already copied for this stage, by their old ids.
    """
    nodes = [node for node in module.graph.nodes if node.op in ("call_module", "get_attr")]
    # Modules before what lies in them.
    for target, op in sorted({(str(node.target), node.op) for node in nodes}):
        owner_path, _, field = target.rpartition(".")
        owner = module.get_submodule(owner_path)
        found = fetch_attribute(owner, field)
        if op == "get_attr":
            if id(found) in moved:
                setattr(owner, field, moved[id(found)])
            continue
        if all(id(p) not in moved for p in found.parameters()):
            continue
        if id(found) not in leaves:
            # All else is the same tensors as before.
            memo: dict[int, object] = {id(t): t for t in (*found.parameters(), *found.buffers())}
            leaves[id(found)] = copy.deepcopy(found, memo | dict(moved))
        setattr(owner, field, leaves[id(found)])
