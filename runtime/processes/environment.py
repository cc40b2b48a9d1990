"""Environment variables, network interfaces and signals of a worker process. No torch here.

torchrun, srun and our own launcher (`launcher`) tell a worker by the same variables who it is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ...profiles.errors import RunError, UserError

DEFAULT_PORT = 29500
"""torchrun's own, where MASTER_PORT isn't set."""

LOOPBACK = "127.0.0.1"
"""Where the workers of one host meet and talk to each other."""


@dataclass(frozen=True)
class Launched:
    """One worker of many, as its launcher started it.

    Attributes:
        by: "torchrun" or "srun".
        address: of the store at which the workers meet, a name or an address; `port` likewise.
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
            f"{by}: MASTER_ADDR isn't set: give the address of the host of rank 0 "
            "(docs/machines.md)"
        )
    return Launched(
        by=by,
        rank=_number(environment, rank),
        world_size=_number(environment, world_size),
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT", DEFAULT_PORT, most=65535),
        one_host=one_host,
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
        local_rank=_number(environment, "LOCAL_RANK" if by == "torchrun" else "SLURM_LOCALID", 0),
    )


def variables_of(launched: Launched) -> dict[str, str]:
    """The environment variables by which torchrun tells a worker of a single host who it is."""
    return {
        "RANK": str(launched.rank),
        "LOCAL_RANK": str(launched.local_rank),
        "WORLD_SIZE": str(launched.world_size),
        "LOCAL_WORLD_SIZE": str(launched.world_size),
        "MASTER_ADDR": launched.address,
        "MASTER_PORT": str(launched.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(launched.agent_store),
        "TORCHELASTIC_RESTART_COUNT": str(launched.attempt),
        # NCCL's own watchdog ends a process whose communication has failed.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


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


def _number(
    environment: Mapping[str, str], name: str, default: int | None = None, most: int | None = None
) -> int:
    text = environment.get(name, None if default is None else str(default))
    if text is None or not text.isdecimal():
        raise UserError(f"{name}: {text!r} isn't a whole number")
    if most is not None and int(text) > most:
        raise UserError(f"{name}: {text} is more than {most}")
    return int(text)


# Network interfaces that gloo and NCCL listen on ------------------------------------------------

VARIABLE = "GLOO_SOCKET_IFNAME"
"""gloo's own; what the user has set there stays."""

NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
"""NCCL's. What has an equals sign in front is a whole name, not the beginning of one."""


def loopback() -> str:
    """Name of the loopback device."""
    return "lo" if Path("/sys/class/net/lo").exists() else "lo0"


def use_interface(launched: Launched) -> str:
    """Let gloo and NCCL listen on the interface from which the address where all meet is reached;
    on the loopback device alone, where all are on one host.

    Returns its address. Raises UserError when there is none, or no other host can reach it.
    """
    if launched.one_host:
        os.environ[VARIABLE] = loopback()
        os.environ[NCCL_VARIABLE] = f"={loopback()}"
        return LOOPBACK
    address = own_address(launched.address, launched.port)
    if VARIABLE in os.environ:
        return address
    if address.startswith("127.") or address == "::1":
        raise UserError(
            f"MASTER_ADDR {launched.address} is {address} here, which other hosts can't reach: "
            f"give an address of the network between them, or name the interface in {VARIABLE}"
        )
    name = interface_of(address)
    if name is None:
        raise UserError(
            f"no interface has the address {address}, from which MASTER_ADDR {launched.address} "
            f"is reached: name one in {VARIABLE}"
        )
    os.environ[VARIABLE] = name
    os.environ.setdefault(NCCL_VARIABLE, f"={name}")
    return address


def own_address(host: str, port: int) -> str:
    """This host's address on the way to another. Nothing is sent. Raises UserError."""
    try:
        family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"MASTER_ADDR {host}: can't be reached: {error.strerror}") from None


def interface_of(address: str) -> str | None:
    """The interface with that address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.split("%")[0] == address for found in addresses):
            return str(name)
    return None


# Who is at the other end of connections on this host --------------------------------------------

_ESTABLISHED = "01"
_MAPPED = "0000000000000000FFFF0000"
"""In front of an IPv4 address that is written as one of IPv6."""


def own_sockets() -> frozenset[str]:
    """Numbers of the sockets that this process has; none where the system doesn't tell (Linux
    does)."""
    found = set()
    with contextlib.suppress(OSError):
        for file in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                kind, _, number = os.readlink(f"/proc/self/fd/{file}").partition(":")
                if kind == "socket":
                    found.add(number.strip("[]"))
    return frozenset(found)


def other_users(since: frozenset[str]) -> list[int]:
    """Users besides this one whose processes on this host this one has connections with over TCP,
    by their numbers.

    gloo takes whoever calls, and what it then sends can be anybody's.

    Args:
        since: sockets of before (`own_sockets`), which aren't looked at.
    """
    mine, users = own_sockets() - since, {}
    ours: list[tuple[str, str]] = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            # proc_net(5); what nobody has taken yet has the number 0.
            for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
                _, here, there, state, _, _, _, user, _, socket_number, *_ = line.split()
                here, there = here.removeprefix(_MAPPED), there.removeprefix(_MAPPED)
                if state == _ESTABLISHED and socket_number != "0":
                    users[here, there] = int(user)
                    if socket_number in mine:
                        ours.append((here, there))
    found = {users.get((there, here), os.getuid()) for here, there in ours}
    return sorted(found - {os.getuid()})


def check_users(name: str, since: frozenset[str]) -> None:
    """Raise RunError, which names this worker, where there are `other_users`."""
    if users := other_users(since):
        raise RunError(
            f"{name}: a process of another user (number {users[0]}) has connected to it as if it "
            "were a worker; nothing has been trained"
        )


# Signals ----------------------------------------------------------------------------------------

ENDING_SIGNALS = (
    *("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"),
    *("SIGALRM", "SIGVTALRM", "SIGPROF", "SIGXCPU"),
)
"""Signals from outside that end a process which does nothing about them."""


def take_signals(handler: Callable[[int, object], None]) -> dict[int, Any]:
    """Have signals that would end this process call `handler` instead. What it ignores (nohup) or
    handles itself stays so; only a main thread takes signals. Returns what was there before, by
    the signals' numbers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [getattr(signal, name) for name in ENDING_SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    ends = (signal.SIG_DFL, signal.default_int_handler)
    return {n: signal.signal(n, handler) for n, found in before.items() if found in ends}
