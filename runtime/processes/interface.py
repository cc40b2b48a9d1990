"""Which network interface gloo is to use."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil

from ...profiles.errors import UserError
from .environment import Launched

VARIABLE = "GLOO_SOCKET_IFNAME"
"""gloo's own; what the user has set there stays."""

NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
"""NCCL's. What has an equals sign in front is a whole name, not the beginning of one."""


def loopback() -> str:
    """Name of the loopback device."""
    return "lo" if Path("/sys/class/net/lo").exists() else "lo0"


def use_loopback() -> None:
    """Let gloo and NCCL listen on the loopback device alone."""
    os.environ[VARIABLE] = loopback()
    os.environ[NCCL_VARIABLE] = f"={loopback()}"


def use_interface(launched: Launched) -> str:
    """Let gloo and NCCL listen on the interface from which the address where all meet is reached.

    Returns its address. Raises UserError when there is none, or no other host can reach it.
    """
    if launched.one_host:
        use_loopback()
        return "127.0.0.1"
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
