"""Trials before a run of what would show at its checkpoints alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec
import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.optim import Optimizer

from ...profiles.errors import FileError, TargetError, TimeprestError
from ...profiles.measuring.process_settings import one_at_a_time
from ...profiles.tasks.hooks import describe_error, in_one_line
from ...profiles.tasks.optimizers import Named, for_use, is_librarys
from ...profiles.tracing.call import unchanged
from ..prepare.devices import device_kind, random_state
from ..prepare.prepared import Prepared
from ..prepare.tied_parameters import expanded, state_of, treat_alike, write
from ..records.metrics import EpochSums
from ..records.run_dir import tensor_bytes
from ..stage.optimizer import check_updates, make_optimizer, step_optimizer, system_optimizer
from ..stage.runner import StageRunner
from .checkpoint import contents
from .start import put_back
from .worker_state import WorkerState, give_back, keep

# Files --------------------------------------------------------------------------------------


@one_at_a_time
def try_kept(prepared: Prepared) -> list[str]:
    """Make what each stage updates by, and try what checkpoints keep of it and of the model.

    Returns warnings. Raises as `check_updates`, `try_optimizers` and `try_state`.
    """
    check_updates(prepared)
    return [*try_optimizers(prepared), *try_state(prepared)]


def try_state(prepared: Prepared) -> list[str]:
    """Write a bit of each tensor of the model's state to a file in memory, read it back and put it
    where it was; and have the model load its own state_dict, whose names exports have.

    Returns warnings: what exports couldn't be loaded for.

    Raises TargetError for a tensor that isn't the same again.
    """
    model = prepared.model.whole
    if prepared.settings.checkpoint_every != 0:
        for module in (model, *(piece.module for piece in prepared.model.pieces)):
            reread = state_of(module)
            for name, tensor in {**dict(module.named_buffers()), **state_of(module)}.items():
                if isinstance(tensor, Tensor):
                    _try_tensor(name, tensor, reread.get(name, tensor))
    for name, tensor in state_of(model).items():
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided and expanded(tensor):
            return [
                f"the model's {name!r} is an expanded tensor, whose numbers share memory: no "
                "load_state_dict() can write into it, so that what tp-run export writes can't be "
                "loaded; give it memory of its own (.clone())"
            ]
    written = prepared.model.first_written
    tied = [name for name, first in written.items() if name != first]
    if tied and written.keys() != prepared.model.names.keys():
        return [
            f"the model's {tied[0]!r} is tied, and hooks of its state_dict() change names: what "
            "tp-run export writes has it under each name, for load_state_dict(); safetensors' "
            "load_model() wouldn't take it"
        ]
    try:
        with unchanged(model):
            model.load_state_dict(model.state_dict())
    except Exception as error:  # the user's model, or torch of it
        return [
            "the model's load_state_dict() doesn't take what its own state_dict() gives, and won't "
            f"take what tp-run export writes: {describe_error(error)}"
        ]
    return []


def _try_tensor(name: str, tensor: Tensor, reread: Tensor) -> None:
    if tensor.numel() and tensor.layout == torch.strided and tensor.data_ptr() != reread.data_ptr():
        raise TargetError(
            f"the model's state {name!r} is made anew whenever it is asked for (get_extra_state): "
            "a run that is resumed couldn't put it back; keep it in a buffer, or train with "
            "--checkpoint-every 0"
        )
    with in_one_line(
        f"the model's {name!r} can't be written to a checkpoint and read again",
        mend="; give it another kind of tensor, or train with --checkpoint-every 0",
    ):
        bit = tensor.detach()[tuple(slice(0, 2) for _ in tensor.shape)]
        found = load(tensor_bytes({name: bit}))[name]
        write(bit, found)
        same = torch.equal(found.nan_to_num(), bit.cpu().nan_to_num())
    if not same:
        raise TargetError(f"the model's {name!r} isn't the same when a checkpoint is read again")


def try_checkpoint(runners: Sequence[StageRunner]) -> None:
    """Write a checkpoint in memory, and give the workers what it has of them.

    Raises TargetError where they aren't in the same state then.
    """
    weights: dict[int, dict[str, Tensor]] = {}
    for runner in sorted(runners, key=lambda each: not each.replica.leads):
        random, file = random_state(runner.device), runner.replica.file
        found = contents(runner, random, EpochSums(), {})
        if runner.replica.leads:
            weights[runner.number] = load(found[f"weights/{file}.safetensors"])
        state = msgspec.json.decode(found[f"state/{file}.json"], type=WorkerState)
        tensors = load(found[f"state/{file}.safetensors"])
        try:
            put_back(runner, weights[runner.number], state, tensors, "a checkpoint")
        except (KeyError, ValueError, RuntimeError, FileError) as error:
            raise TargetError(
                f"{runner.replica.name}: a run couldn't go on from its checkpoints: {error}"
            ) from error
        reread = contents(runner, random, EpochSums(), {})
        odd = [name for name, content in found.items() if reread[name] != content]
        if odd:
            raise TargetError(
                f"{runner.replica.name}: what a run would go on with from its checkpoints isn't "
                f"what they were written with ({odd[0]})"
            )


# Optimizers ---------------------------------------------------------------------------------

_Tried = tuple[Optimizer, dict[str, nn.Parameter]]
"""An optimizer, and its parameters by name."""

_MOST_BYTES = 2**23
"""Of the parameters that an optimizer is tried on, but for the first of each number of
dimensions."""


def try_optimizers(prepared: Prepared) -> list[str]:
    """Step each stage's optimizer on copies of a few of its parameters, put what checkpoints keep
    of it into another one, and see whether both go on alike. Torch's own aren't tried, nor any for
    GPUs or where no checkpoints are written.

    Returns warnings: what of them a resumed run wouldn't have.

    Raises TargetError for one that keeps what can't be written.
    """
    settings = prepared.settings
    if settings.checkpoint_every == 0 or device_kind(prepared.plan, settings) != "cpu":
        return []
    lines: dict[str, None] = {}
    with torch.random.fork_rng(devices=[]):
        for s in range(len(prepared.model.pieces)):
            for line in _try_stage(prepared, s):
                lines[line] = None
    return [*lines]


def _try_stage(prepared: Prepared, s: int) -> list[str]:
    some = _few(prepared.model.updated_by(s))
    # What can't be tried on copies, as where an optimizer looks its parameters up in a model that
    # it knows, shows in the run.
    first: _Tried | None = None
    second: _Tried | None = None
    with suppress(Exception):
        first = _made(prepared, s, some)
        if first is None or is_librarys(first[0]):
            return []
        for seed in range(2):
            _step(*first, seed)
            with for_use(first[0]):
                pass
        second = _made(prepared, s, some)
    if first is None or second is None:
        return []
    optimizer, named = first
    tensors: dict[str, Tensor] = {}
    kind = type(optimizer).__name__
    state = WorkerState(
        updates=0,
        optimizer=kind,
        **keep(optimizer, {p: name for name, p in named.items()}, tensors),
        sums=EpochSums(),
        logs={},
    )
    for name, p in second[1].items():
        p.data.copy_(named[name].data)
    try:
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        give_back(second[0], second[1], state, kept)
        for each in (first, second):
            _step(*each, 2)
    except (TimeprestError, KeyError, ValueError, RuntimeError) as error:
        return [
            f"the task's optimizer, a {kind}, doesn't take what checkpoints keep of it, so that a "
            f"run which is resumed will fail: {error}"
        ]
    pairs = ((p.nan_to_num(), second[1][name].nan_to_num()) for name, p in named.items())
    if all(torch.equal(*pair) for pair in pairs):
        return []
    return [
        f"the task's optimizer, a {kind}, keeps more than is in its state: a run that is resumed "
        "begins with that anew, and trains otherwise; give it a state_dict() and a "
        "load_state_dict() that have all of it (docs/checkpoints.md)"
    ]


def _few(named: Named) -> list[tuple[str, nn.Parameter]]:
    """The smallest ones, and one of each number of dimensions."""
    found, total, dimensions = [], 0, set[int]()
    for name, p in sorted(named, key=lambda each: each[1].numel()):
        total += p.nbytes
        if total <= _MOST_BYTES or p.dim() not in dimensions:
            dimensions.add(p.dim())
            found.append((name, p))
    return found


def _made(prepared: Prepared, s: int, some: Named) -> _Tried | None:
    """A new optimizer, over copies, and those; None: there is nothing to train."""
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in some}
    for name, p in some:
        treat_alike(p, copies[name])
    model = prepared.model
    every = [(n, p) for n, p in {**model.parameters, **copies}.items() if p.requires_grad]
    optimizer = make_optimizer(
        prepared.task, prepared.settings, copies.items(), f"stage {s}", model.matrices, every
    )
    return None if optimizer is None else (system_optimizer(prepared, s, optimizer), copies)


def _step(optimizer: Optimizer, named: dict[str, nn.Parameter], seed: int) -> None:
    """With gradients, and numbers to draw, that go by the seed."""
    torch.manual_seed(seed)
    for p in named.values():
        p.grad = torch.randn_like(p)
    step_optimizer(optimizer)
