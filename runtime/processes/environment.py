"""Workers that torchrun or srun started: who they are, as their environment says. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...profiles.errors import UserError

DEFAULT_PORT = 29500
"""torchrun's own, where MASTER_PORT isn't set."""


ENDING_SIGNALS = (
    *("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"),
    *("SIGALRM", "SIGVTALRM", "SIGPROF", "SIGXCPU"),
)
"""Signals from outside that end a process which does nothing about them."""


@dataclass(frozen=True)
class Launched:
    """One worker of many, started from outside.

    Attributes:
        by: "torchrun" or "srun".
        address: where the workers meet, a name or an address; `port` likewise.
        one_host: all workers are on this one.
        agent_store: the launcher itself runs the store at that address; else rank 0 does.
        attempt: how often the launcher has started all workers anew.
        local_rank: among the workers of its host.
    """

    by: str
    rank: int
    world_size: int
    address: str
    port: int = DEFAULT_PORT
    one_host: bool = False
    agent_store: bool = False
    attempt: int = 0
    local_rank: int = 0


def launched_by(environment: Mapping[str, str]) -> Launched | None:
    """How this process was started; None: by hand, and it starts its workers itself.

    Raises UserError when the environment says half of it.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        by, rank, world_size = "torchrun", "RANK", "WORLD_SIZE"
        one_host = environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"]
    elif "SLURM_STEP_ID" in environment and _tasks(environment) is not None:
        by, rank, world_size = "srun", "SLURM_PROCID", _tasks(environment) or ""
        if environment[world_size] == "1":
            return None
        nodes = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES"))
        one_host = nodes == "1"
    else:
        return None
    if "MASTER_ADDR" not in environment:
        raise UserError(
            f"{by}: MASTER_ADDR isn't set: give the address of the host of rank 0 (docs/running.md)"
        )
    return Launched(
        by=by,
        rank=_number(environment, rank),
        world_size=_number(environment, world_size),
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT", DEFAULT_PORT),
        one_host=one_host,
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
        local_rank=_number(environment, "LOCAL_RANK" if by == "torchrun" else "SLURM_LOCALID", 0),
    )


def check_world_size(launched: Launched, workers: int) -> None:
    """Raise UserError unless there is a process for each worker of the plan."""
    if launched.world_size != workers:
        option = "--nproc-per-node × --nnodes" if launched.by == "torchrun" else "--ntasks"
        raise UserError(
            f"{launched.by} started {launched.world_size} processes, and the plan has "
            f"{workers} workers (stages with their replicas): {option} must be {workers}"
        )


def _tasks(environment: Mapping[str, str]) -> str | None:
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    return next((name for name in names if name in environment), None)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, None if default is None else str(default))
    if text is None or not text.isdecimal():
        raise UserError(f"{name}: {text!r} isn't a whole number")
    return int(text)
