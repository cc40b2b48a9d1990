"""Tied parameters of a prepared model: one tensor on each device, a copy for each further device.

The gradients of copies are summed over the devices before every update, so that copies which start
alike and have optimizers alike stay alike, bit by bit. Of a device's stages that use the same
parameter, the first one updates it. What isn't trained has no gradients, and may be on any stages.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from ...planner.costs.tied_parameters import not_behind
from ...planner.plan import Plan
from ...profiles.autograd.boundary import storage_bytes, storage_key
from ...profiles.errors import PlanError, TargetError
from ...profiles.tracing.graph import GraphBody, fetch_attribute, graph_of


@dataclass(frozen=True)
class TiedParameters:
    """Parameters that several stages use: copies on several devices, or one tensor on one.

    Attributes:
        stages: ascending. Of those of one device the first one updates them, if they are trained,
            and has them in its state.
        names: per stage, of its copies in its own piece; the same sequence at every stage. Of one
            tensor, at the first stage alone.
    """

    stages: tuple[int, ...]
    names: Mapping[int, tuple[str, ...]]

    @property
    def owner(self) -> int:
        """The first of the stages."""
        return self.stages[0]

    @property
    def group(self) -> str:
        """What messages call those who sum the gradients."""
        return f"tied stages {', '.join(map(str, self.stages))}"

    def of(self, stage: int, module: nn.Module) -> list[nn.Parameter]:
        """Those in a stage's piece, or in a replica of it."""
        named = dict(module.named_parameters())
        return [named[name] for name in self.names[stage]]


@dataclass(frozen=True)
class Ties:
    """All tied parameters of a model.

    Attributes:
        copied: over several devices; stages are those that update a copy, one of each device.
        shared: by several stages of one device.
        frozen: the same of those that aren't trained. Of their copies nothing needs to be known.
    """

    copied: tuple[TiedParameters, ...] = ()
    shared: tuple[TiedParameters, ...] = ()
    frozen: tuple[TiedParameters, ...] = ()


def give_copies(stages: Sequence[Sequence[GraphBody]], placement: Sequence[int] = ()) -> Ties:
    """Replace parameters that an earlier device uses, too, by copies, in place.

    Args:
        stages: per stage, its pieces in all modes, which share their parameters.
        placement: per stage, its device; by default, each has its own.
    """
    placement = placement or range(len(stages))
    holders: dict[int, list[int]] = {}
    shared: dict[int, nn.Parameter] = {}
    for s, modules in enumerate(stages):
        for p in {id(p): p for module in modules for p in module.parameters()}.values():
            holders.setdefault(id(p), []).append(s)
            shared[id(p)] = p
    tied = {key: held for key, held in holders.items() if len(held) > 1}
    # By stages, and by those of them that know a parameter by name.
    copied, alone, frozen = (dict[tuple[int, ...], dict[int, list[str]]]() for _ in range(3))
    moved: dict[int, dict[int, nn.Parameter]] = {}
    for key, held in tied.items():
        on_device: dict[int, list[int]] = {}
        for s in held:
            on_device.setdefault(placement[s], []).append(s)
        owners = [mine[0] for mine in on_device.values()]
        trained = shared[key].requires_grad
        noted = [(copied, owners, owners)] if len(owners) > 1 and trained else []
        by = alone if trained else frozen
        noted += [(by, mine, mine[:1]) for mine in on_device.values() if len(mine) > 1]
        for found, users, named in noted:
            names = found.setdefault(tuple(users), {s: [] for s in named})
            for s in named:
                own = stages[s][0].named_parameters()
                names[s].append(next(name for name, p in own if id(p) == key))
        for number, mine in enumerate(on_device.values()):
            if number:
                parameter = shared[key]
                made = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                treat_alike(parameter, made)
                for s in mine:
                    moved.setdefault(s, {})[key] = made
    for s, copies in moved.items():
        leaves: dict[int, nn.Module] = {}
        for module in stages[s]:
            _replace(module, copies, leaves)
    return Ties(
        *(
            tuple(
                TiedParameters(users, {s: tuple(names) for s, names in by_stage.items()})
                for users, by_stage in found.items()
            )
            for found in (copied, alone, frozen)
        )
    )


def check_memory(modules: Iterable[nn.Module]) -> None:
    """Raise TargetError where a trained parameter has memory in common with another tensor of the
    model, which doesn't follow where a stage runs on other versions of its parameters.

    Parameters may be views of one tensor, side by side, and trained ones of each other as a whole.

    Args:
        modules: the model, and its pieces, which may have tensors that they found in its lists.
    """
    sharing: dict[int, dict[int, tuple[str, Tensor]]] = {}
    for path, module in (found for root in modules for found in root.named_modules()):
        for key, value in {**vars(module), **module._parameters, **module._buffers}.items():
            # What torch's spectral_norm puts there is computed anew from that one.
            computed = f"{key}_orig" in module._parameters
            if isinstance(value, Tensor) and value.layout == torch.strided and not computed:
                named = f"{path}.{key}".lstrip("."), value
                sharing.setdefault(storage_key(value), {}).setdefault(id(value), named)
    for named_tensors in sharing.values():
        names, tensors = zip(*named_tensors.values(), strict=True)
        there = storage_bytes(tensors[0])
        whole = all(isinstance(t, nn.Parameter) and t.nbytes == there for t in tensors)
        trained = {t.requires_grad for t in tensors}
        # One that isn't trained has no versions beside the trained one's.
        tied = whole and len(trained) == 1
        if any(trained) and not tied and sum(t.nbytes for t in tensors) > there:
            raise TargetError(
                f"the model's {shorten(', '.join(names), 120, placeholder=' …')} have memory in "
                "common, and systems that don't flush have other versions of parameters alone: "
                "give each memory of its own (.clone()), or plan with one that flushes (gpipe)"
            )


def treat_alike(parameter: nn.Parameter, copied: nn.Parameter) -> None:
    """Give a copy the hooks of a parameter, and its attributes, by which an optimizer may have been
    told what to do with it; torch copies neither."""
    copied.__dict__.update(parameter.__dict__)
    if not parameter.requires_grad:
        # It may have had some before it was frozen, and takes none now.
        return
    for hook in (parameter._backward_hooks or {}).values():
        copied.register_hook(hook)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        copied.register_post_accumulate_grad_hook(hook)


def computed_tensors(module: nn.Module) -> dict[int, object]:
    """A memo for copies of a module: what its attributes hold that was computed from weights, as
    torch.nn.utils.weight_norm leaves it there. Forwards compute it anew, and torch copies none."""
    attributes = (value for inner in module.modules() for value in vars(inner).values())
    computed = (t for t in attributes if isinstance(t, Tensor) and not t.is_leaf)
    return {id(t): t.detach().clone() for t in computed}


def check_stages(ties: Ties, plan: Plan) -> None:
    """Raise PlanError for copies where a system doesn't flush, which a plan has where the model
    returns a parameter; and for stages of one device that share parameters, where none of their
    backwards is always the last."""
    for tied in ties.copied if not plan.system.flushes else ():
        owner, *others = tied.stages
        raise PlanError(
            f"plan: {', '.join(tied.names[owner])} of stage {owner} is used on stage {others[0]} "
            f"too, as where the model returns a parameter, and in {plan.variant}, which never "
            "flushes, the two would differ; return what is computed of it, or plan with a system "
            "that flushes (gpipe)"
        )
    links = [(edge.source, edge.target) for edge in plan.edges if edge.needs_grad]
    for one in ties.shared:
        apart = not_behind(one.owner, one.stages[1:], links)
        if apart is not None:
            raise PlanError(
                f"plan: stages {one.owner} and {apart} share parameters and a device, and no "
                f"gradient goes from stage {apart} back to stage {one.owner}, so neither's "
                "backward is always the last; move the layers to one stage"
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


def _replace(
    module: GraphBody, moved: Mapping[int, nn.Parameter], leaves: dict[int, nn.Module]
) -> None:
    """Put copies in the places of parameters (by id), without touching modules that others use too.
    `leaves`: modules already copied for this stage, by their old ids."""
    nodes = [node for node in graph_of(module).nodes if node.op in ("call_module", "get_attr")]
    # Modules before what lies in them.
    for target, op in sorted({(str(node.target), node.op) for node in nodes}):
        owner_path, _, field = target.rpartition(".")
        owner = fetch_attribute(module, owner_path) if owner_path else module
        found = fetch_attribute(owner, field)
        if op == "get_attr":
            if id(found) in moved:
                owner._parameters[field] = moved[id(found)]
            continue
        if all(id(p) not in moved for p in found.parameters()):
            continue
        if id(found) not in leaves:
            # All else is the same tensors as before.
            memo = computed_tensors(found)
            memo |= {id(t): t for t in (*found.parameters(), *found.buffers())}
            leaves[id(found)] = copy.deepcopy(found, memo | dict(moved))
        owner._modules[field] = leaves[id(found)]


# Names under which a model's state is written ----------------------------------------------------


def state_of(module: nn.Module) -> dict[str, Any]:
    """A module's state as its state_dict has it, under the module's own names: hooks that rename,
    of modules or of torch's checkpoint_wrapper, are left out."""
    found: dict[str, Any] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        inner._save_to_state_dict(found, f"{path}." if path else "", keep_vars=False)
    return found


def names_in_state(model: nn.Module) -> dict[str, str]:
    """For each name of a model's state, the one that its state_dict has for it: hooks may change
    them.

    Raises TargetError where the two don't hold the same tensors: what a run writes couldn't be
    loaded by load_state_dict.
    """
    own, given = state_of(model), model.state_dict()
    # Tied tensors have several names on either side, in the same sequence.
    others: dict[object, list[str]] = {}
    for name in given:
        if name not in own:
            others.setdefault(_memory(given[name]), []).append(name)
    found, odd = {}, []
    for name, tensor in own.items():
        left = others.get(_memory(tensor), [])
        found[name] = name if name in given else left.pop(0) if left else ""
        made = name.endswith(EXTRA_STATE)
        if not found[name] or not (made or _memory(given[found[name]]) == _memory(tensor)):
            odd.append(name)
    odd += [name for left in others.values() for name in left]
    if odd:
        some = shorten(", ".join(odd), 80, placeholder=" …")
        raise TargetError(
            f"the model's state_dict() has {some} otherwise than its parameters and buffers are "
            "(hooks of its own?): what a run writes couldn't be loaded by load_state_dict(); leave "
            "that out of model()"
        )
    return found


EXTRA_STATE = "_extra_state"
"""What the names of those end with that get_extra_state() makes."""


def _memory(value: Any) -> object:
    if not isinstance(value, Tensor):
        return id(value)
    strided = value.layout == torch.strided and value.numel()
    return (value.data_ptr() if strided else 0, value.shape, value.dtype)


def same_tensors(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, str]:
    """Of the names in a state, those that stand for what an earlier one does, and that one.

    Args:
        names: for each name of a parameter, the first that the model has for it: also of copies on
            several stages.
    """
    first: dict[tuple[object, ...], str] = {}
    found = {}
    for name, tensor in state.items():
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        of = names.get(name, first.setdefault(same, name))
        if of != name and tensor.numel():
            found[name] = of
    return found


def expanded(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions along which a tensor's elements share memory (stride 0)."""
    sizes = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(d for d, (size, stride) in sizes if size > 1 and not stride)


def write(tensor: Tensor, numbers: Tensor) -> None:
    """Write numbers into a tensor of a state; those of an expanded one, which come from another
    such, once into the memory that they share."""
    for d in expanded(tensor):
        tensor, numbers = tensor.narrow(d, 0, 1), numbers.narrow(d, 0, 1)
    tensor.detach().copy_(numbers)
