"""What crosses a plan's cuts: shapes that stages promise each other, and a message over each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...profiles.errors import RunError, one_line
from ...profiles.target import resolve
from ...profiles.tasks.hooks import in_one_line
from ...profiles.tasks.shapes import at_profiled
from ...profiles.tracing.call import unchanged, without_data
from ...profiles.tracing.pieces import decode, encode
from ..prepare.devices import forward_context
from ..prepare.messages import tensor_of
from ..prepare.prepared import Prepared
from ..prepare.tracing import is_small
from ..processes.rendezvous import Rendezvous


def check_shapes(prepared: Prepared) -> tuple[Any, Any]:
    """Run every stage's forward for one micro-batch, on what the cuts before it promise.

    Large models run on fake tensors.

    Returns the model's result, and the target of its micro-batch.

    Raises RunError where a stage makes something else.
    """
    target = resolve(prepared.settings.task)
    fake, result, wanted = not is_small(prepared.plan), None, None
    for replica in prepared.replicas:
        if not replica.leads:
            continue
        s = replica.stage
        call, wanted = target.call(prepared.distribution.shares[replica.number].samples)
        inputs = at_profiled(call, prepared.plan.profile.varying).tensors
        named = dict(zip(prepared.model.inputs, inputs, strict=False))
        specs = prepared.model.stages[s].specs
        arguments = [
            named[name] if name in named else decode(tensor_of(specs[name]), specs[name].kind)
            for name in prepared.model.pieces[s].inputs
        ]
        module = prepared.model.pieces[s].module
        looking = without_data(module) if fake else unchanged(module)
        failing = in_one_line(f"{replica.name}: its forward failed", RunError)
        precision = forward_context(prepared.model.autocast)
        with failing, torch.no_grad(), looking as mode, precision:
            if mode is not None:
                arguments = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
            made: Sequence[Any] = module(*arguments)
        for name, value in zip(prepared.model.pieces[s].outputs, made, strict=False):
            tensor, spec = encode(value, name), specs[name]
            if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                raise RunError(
                    f"{replica.name} makes {name!r} as {tuple(tensor.shape)} {tensor.dtype}, and "
                    f"what follows takes {spec.shape} {spec.dtype}"
                )
        result = made[-1] if prepared.model.pieces[s].has_result else None
    return result, wanted


def send_over_cuts(prepared: Prepared, rendezvous: Rendezvous) -> None:
    """One message over each route, so that a firewall between two hosts shows now. Raises
    RunError."""
    bound = timedelta(seconds=prepared.settings.timeout_s)
    rank = rendezvous.rank
    store = rendezvous.store.below("gloo")
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=len(prepared.workers), timeout=bound
        )
        works = []
        for route in prepared.distribution.routes:
            if route.handed_over:
                continue
            message = torch.zeros(route.spec.shape, dtype=route.spec.dtype)
            if route.source.rank == rank:
                works.append(dist.isend(message, route.target.rank, tag=route.number))
            elif route.target.rank == rank:
                works.append(dist.irecv(message, route.source.rank, tag=route.number))
        for work in works:
            assert work is not None
            work.wait(bound)
        dist.barrier()
    except RuntimeError as error:
        reason = one_line(error)[:200]
        raise RunError(f"rank {rank}: no message came over the network: {reason}") from error
    dist.destroy_process_group()
