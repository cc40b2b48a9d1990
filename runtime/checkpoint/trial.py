"""Trials before a run of what would show at its checkpoints alone."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...profiles.errors import TimeprestError
from ...profiles.tasks.optimizers import Named, for_use, is_librarys
from ..prepare.devices import device_kind
from ..prepare.prepare import Prepared
from ..prepare.tied_parameters import treat_alike
from ..records.metrics import EpochSums
from ..stage.optimizer import make_optimizer, step_optimizer, system_optimizer
from .worker_state import WorkerState, give_back, keep

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
    if all(_same(p, second[1][name]) for name, p in named.items()):
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


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())
