"""One mini-batch of training, as each rival does it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from timeprest.runtime.prepare.devices import CPU
from timeprest.runtime.prepare.samples import Samples
from torch import Tensor, nn

from ..tasks import Race
from .shared_gpu import stage_shapes, through_pinned_memory

Step = Callable[[int], float | None]
"""Trains on the mini-batch of a number; returns its loss where it is known."""


def batches(race: Race, rank: int = 0, ranks: int = 1) -> Callable[[int], tuple[Tensor, Tensor]]:
    """What tp-run would take for each mini-batch; of several ranks each takes a part."""
    samples = Samples(race, "train", race.mini_batch // ranks, seed=0)

    def take(k: int) -> tuple[Tensor, Tensor]:
        each = race.mini_batch // ranks
        first = k * race.mini_batch + rank * each
        (x,), y = samples.take(0, range(first, first + each))
        return x, y

    return take


def seeded(race: Race) -> nn.Sequential:
    """The model with the weights that tp-run gives it."""
    torch.manual_seed(0)
    return race.model()


def plain(race: Race, micro_batches: int, device: torch.device = CPU) -> Step:
    """One process; with several micro-batches their gradients are summed up."""
    model, take = seeded(race).to(device), batches(race)
    optimizer = race.optimizer(model.parameters())

    def step(k: int) -> float:
        x, y = (part.to(device) for part in take(k))
        total = torch.zeros((), device=device)
        for part, target in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            loss = race.loss(model(part), target) / micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step


def data_parallel(race: Race) -> Step:
    """Two processes with half of the mini-batch each."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    take = batches(race, rank, ranks)
    model = nn.parallel.DistributedDataParallel(
        seeded(race), gradient_as_bucket_view=True, static_graph=True
    )
    optimizer = race.optimizer(model.parameters())

    def step(k: int) -> float:
        x, y = take(k)
        loss = race.loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _pieces(model: nn.Sequential, cuts: Sequence[int]) -> list[nn.Sequential]:
    children = list(model)
    bounds = itertools.pairwise((0, *cuts, len(children)))
    return [nn.Sequential(*children[a:b]) for a, b in bounds]


def torch_pipeline(
    race: Race,
    schedule: str,
    micro_batches: int,
    cuts: Sequence[int],
    device: torch.device = CPU,
) -> Step:
    """A schedule of torch.distributed.pipelining, with one stage a rank or, as a V, with two."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = _pieces(seeded(race).to(device), cuts)
    take = batches(race)
    shapes = stage_shapes(race, pieces, micro_batches) if device.type == "cuda" else None
    if shapes:
        schedules._batch_p2p = through_pinned_memory  # type: ignore[assignment]
    mine = [rank] if len(pieces) == ranks else [rank, 2 * ranks - 1 - rank]
    stages = [
        pipelining.PipelineStage(pieces[s], s, len(pieces), device, *(shapes[s] if shapes else ()))
        for s in mine
    ]
    kind: Any = getattr(schedules, f"Schedule{schedule}")
    how = stages[0] if len(mine) == 1 else stages
    course = kind(how, n_microbatches=micro_batches, loss_fn=race.loss)
    optimizer = race.optimizer([p for s in mine for p in pieces[s].parameters()])
    first, last = 0 in mine, len(pieces) - 1 in mine

    def step(k: int) -> float | None:
        losses: list[Tensor] = []
        x, y = (p.to(device) for p in take(k)) if first or last else (None, None)
        course.step(
            *([x] if first else []),
            target=y if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum().item() / micro_batches if last else None

    return step


def deepspeed_pipeline(race: Race, micro_batches: int, cuts: Sequence[int]) -> Step:
    """DeepSpeed's pipeline engine; its two layers are the two stages."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed import ops
    from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found]

    # An operation for inference, which training never calls. It would be compiled now, and a rank
    # ended meanwhile leaves a lock for which all later ones wait without end.
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It finds the process group that is there.
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    pieces = _pieces(seeded(race), cuts)
    net = PipelineModule(
        layers=pieces,
        num_stages=len(pieces),
        loss_fn=race.loss,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    config = {
        "train_batch_size": race.mini_batch,
        "train_micro_batch_size_per_gpu": race.mini_batch // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        # Otherwise it clips them to a norm of 1, which nobody else does.
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    optimizer = race.optimizer([p for p in net.parameters() if p.requires_grad])
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    take = batches(race)

    def step(k: int) -> float:
        x, y = take(k)
        parts = zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)
        loss: Tensor = engine.train_batch(data_iter=iter(list(parts)))
        return float(loss)

    return step
