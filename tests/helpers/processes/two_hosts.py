"""Two hosts on one machine: network namespaces joined by a wire, whose speed is what one likes.

As a script it runs a plan over both, its first workers on the one and the rest on the other:

    sudo python tests/helpers/processes/two_hosts.py PLAN \\
        [--rate 1gbit] [--split 1] [-- tp-run's options]

Needs Linux, root, iproute2, and a kernel with network namespaces and veth. The two share the
machine's files and cores; sockets, interfaces, routes and host names are their own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from timeprest.planner.plan import read_plan

PORT = 29500


def why_not() -> str | None:
    """Why this machine can't do it; None: it can."""
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (iproute2, util-linux) here"
    name = f"tp{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces can't be made here: {made.stderr.strip()}"
    wire = ["ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1"]
    wired = subprocess.run(wire, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None if not wired.returncode else f"no veth pair can be made: {wired.stderr.strip()}"


class TwoHosts:
    """Hosts "a" and "b" at 10.77.0.1 and 10.77.0.2, while the context lasts.

    Args:
        rate: of the wire in each direction, as tc writes it; None: as fast as it goes.
    """

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, rate: str | None = None) -> None:
        self.rate = rate
        self.names = tuple(f"tp{os.getpid()}{letter}" for letter in "ab")

    def __enter__(self) -> TwoHosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        a, b = self.names
        for name in self.names:
            _do("ip", "netns", "add", name)
        wire = f"link add wire netns {a} type veth peer name wire netns {b}"
        _do("ip", *wire.split())
        for name, address in zip(self.names, self.addresses, strict=True):
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _do("ip", "-n", name, "link", "set", device, "up")
            if self.rate is not None:
                shape = f"qdisc add dev wire root tbf rate {self.rate} burst 256kb latency 50ms"
                _do("tc", "-n", name, *shape.split())

    def __exit__(self, *exception: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def start(self, host: int, command: Sequence[str], **how: object) -> subprocess.Popen[str]:
        """Start a command on a host, with a host name of its own."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', "host-" + "ab"[host]]
        inside = ["ip", "netns", "exec", self.names[host], *named]
        return subprocess.Popen([*inside, *command], text=True, **how)  # type: ignore[call-overload]

    def torchrun(
        self,
        host: int,
        processes: int,
        arguments: Sequence[str],
        program: Sequence[str] = ("-m", "timeprest.cli.run"),
        **how: object,
    ) -> subprocess.Popen[str]:
        """Start a host's part of tp-run, or of another program, with torchrun."""
        launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host)]
        where = ["--master-addr", self.addresses[0], "--master-port", str(PORT)]
        what = ["--nproc-per-node", str(processes), *program, *arguments]
        return self.start(host, [sys.executable, *launcher, *where, *what], **how)

    @contextmanager
    def cut(self, how: str) -> Iterator[None]:
        """The network broken meanwhile: "lost", nothing that is sent arrives; or "down", the
        second host's interface is."""
        ways = list(zip(self.names, reversed(self.addresses), strict=True))
        try:
            if how == "down":
                _do("ip", "-n", self.names[1], "link", "set", "wire", "down")
            else:
                for name, other in ways:
                    # Sent to a card that there isn't. Losing packets by tc takes a module more.
                    nowhere = f"neigh replace {other} lladdr 02:00:00:00:00:01 dev wire"
                    _do("ip", "-n", name, *nowhere.split(), "nud", "permanent")
            yield
        finally:
            if how == "down":
                _do("ip", "-n", self.names[1], "link", "set", "wire", "up")
            else:
                for name, other in ways:
                    _do("ip", "-n", name, "neigh", "del", other, "dev", "wire")

    def sent_bytes(self, host: int) -> int:
        """What a host has sent over the wire."""
        inside = ["ip", "netns", "exec", self.names[host]]
        path = "/sys/class/net/wire/statistics/tx_bytes"
        return int(subprocess.run([*inside, "cat", path], capture_output=True, check=True).stdout)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def main() -> int:
    """Run a plan over both hosts. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--rate", help="of the wire, such as 1gbit")
    parser.add_argument("--split", type=int, help="workers on the first host  [default: half]")
    options, rest = parser.parse_known_args()
    reason = why_not()
    if reason is not None:
        print(f"two_hosts: {reason}", file=sys.stderr)
        return 2
    workers = sum(len(stage.devices) for stage in read_plan(options.plan).stages)
    first = options.split or max(1, workers // 2)
    arguments = [str(options.plan), *(text for text in rest if text != "--")]
    with TwoHosts(options.rate) as hosts:
        started = [
            hosts.torchrun(host, count, arguments)
            for host, count in enumerate((first, workers - first))
        ]
        codes = [process.wait() for process in started]
        sent = [hosts.sent_bytes(host) for host in (0, 1)]
        print(f"over the wire: {sent[0]} bytes from the first host, {sent[1]} from the second")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
