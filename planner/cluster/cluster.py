"""The cluster and its file: devices with their memory and speed, and what links them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import chain, combinations, pairwise
from math import ceil
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from ...profiles.errors import FileError, TaskWarning, UserError
from ...profiles.files import MAX_BYTES, MAX_FACTOR, converted, read_toml
from ...profiles.options import Option, Spelled
from ...profiles.units import (
    format_bytes,
    parse_bandwidth,
    parse_bytes,
    parse_latency,
    parse_memory,
    parse_seconds,
    shown,
    truth,
    whole_number,
)
from .headroom import Headroom, parse_headroom
from .links import MAX_DEVICES, AllReduce, Network, costs_by_size

# What gloo gives between two processes of one machine.
DEFAULT_BANDWIDTH = "4GB/s"
DEFAULT_LATENCY = "50us"

# The cluster: devices with their memory and speed, and the links between them -------------------

_Memory = Annotated[int, Meta(ge=1, le=MAX_BYTES)]
_Speed = Annotated[float, Meta(ge=1 / MAX_FACTOR, le=MAX_FACTOR)]


# Below, omit_defaults leaves out of the JSON what plans of a flat cluster never had. A default that
# a function makes isn't left out: these fields were always there.


class Device(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """One device; a stage runs on it."""

    name: str
    memory_bytes: _Memory | None = msgspec.field(default_factory=lambda: None)
    """None: no limit."""
    speed: _Speed = msgspec.field(default_factory=lambda: 1.0)
    """Relative to the device that was profiled: 2 halves every time."""
    machine: Annotated[str, Meta(min_length=1)] | None = None
    """Name of the machine it is in. Devices without one are together in a machine of their own."""
    group: Annotated[str, Meta(min_length=1)] | None = None
    """Name of a group, as links between machines are said of it."""
    reserved_bytes: Annotated[int, Meta(ge=0, le=MAX_BYTES)] | None = None
    """What plans leave free of its memory; None, and no share either: nothing was said of it."""
    reserved_share: Annotated[float, Meta(ge=0, lt=1)] | None = None
    """The same as a share of it."""
    kind: Annotated[str, Meta(min_length=1)] | None = None
    """What the profile calls its kind, where it has seconds of several; `speed` is relative then to
    what such a device takes there, until its kind's own speed is counted in (`kind_speed`)."""
    kind_speed: _Speed | None = None
    """How fast its kind is for the whole model, beside the profile's first; None: not looked up."""

    @property
    def alike(self) -> tuple[int | None, float, str | None]:
        """What makes devices interchangeable, wherever they are: memory, speed, kind."""
        return self.usable_bytes, self.speed, self.kind

    @property
    def says_reserved(self) -> bool:
        """Whether what plans leave free was said of this device."""
        return self.reserved_bytes is not None or self.reserved_share is not None

    @property
    def free_bytes(self) -> int:
        """What plans leave free of its memory; 0 without a limit."""
        memory = self.memory_bytes or 0
        return min((self.reserved_bytes or 0) + ceil((self.reserved_share or 0.0) * memory), memory)

    @property
    def usable_bytes(self) -> int | None:
        """What stages may take of its memory; None: there is no limit."""
        return None if self.memory_bytes is None else max(self.memory_bytes - self.free_bytes, 1)

    def memory_for(self, nbytes: int) -> int:
        """The memory that it would need for stages to take so many bytes."""
        return ceil((nbytes + (self.reserved_bytes or 0)) / (1 - (self.reserved_share or 0.0)))


ANY = "*"
"""As an end of a link: any other machine."""


class LinkBetween(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A link of its own between devices, machines or groups (docs/cluster.md)."""

    between: tuple[str, str]
    """Names of the two, in any sequence; the same twice is within it."""
    network: Network

    def rank(self, a: Device, b: Device) -> tuple[int, int] | None:
        """How exactly it names a pair of devices: what is higher goes before others. None: it isn't
        between them."""
        near = a.machine is not None and a.machine == b.machine
        found = [
            tuple(sorted((_rank(x, a, near), _rank(y, b, near)), reverse=True))
            for x, y in (self.between, self.between[::-1])
        ]
        high, low = max(found)
        return (high, low) if low else None


def _rank(end: str, device: Device, near: bool) -> int:
    if end == device.name:
        return 4
    if end == device.machine:
        return 3
    # Of machines, and of devices that are in none.
    if end == device.group and not near:
        return 2
    return int(end == ANY and not near)


class Cluster(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Devices in the order in which stages are laid over them; methods take their positions."""

    devices: Annotated[tuple[Device, ...], Meta(min_length=1)]
    network: Network
    """Between devices of one machine."""
    all_reduce: AllReduce | tuple[AllReduce, ...] | None = msgspec.field(
        default_factory=lambda: None
    )
    """None: not measured. Several are over different numbers of processes."""
    between_machines: Network | None = None
    """Between devices of different machines. None: `network` is between any two devices."""
    links: tuple[LinkBetween, ...] = ()
    """Others, of some pairs."""

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file (TOML). Raises FileError or UserError naming the file and field."""
        return read_cluster(path)

    @property
    def flat(self) -> bool:
        """All devices are in one machine, and all pairs have the same link."""
        first = self.devices[0].machine
        return not self.links and all(device.machine == first for device in self.devices)

    @property
    def uniform(self) -> bool:
        """All devices have the same memory for stages, and the same speed and kind."""
        first = self.devices[0].alike
        return all(device.alike == first for device in self.devices)

    @property
    def kinds(self) -> tuple[tuple[str, float], ...]:
        """Those of its devices, each with its speed (`Device.kind_speed`), or 1."""
        found = {(d.kind, d.kind_speed or 1.0) for d in self.devices if d.kind is not None}
        return tuple(sorted(found))

    @property
    def best_device(self) -> Device:
        """With the most memory and the highest speed that any device has."""
        rooms = [device.usable_bytes for device in self.devices]
        room = None if None in rooms else max(room for room in rooms if room is not None)
        speed = max(device.speed for device in self.devices)
        return Device(name="best", memory_bytes=room, speed=speed)

    def with_headroom(self, headroom: Headroom) -> Cluster:
        """With so much reserved on each device that doesn't say it itself.

        Raises UserError where that is all that one has.
        """
        if not any(headroom):
            return self
        for device in self.devices:
            memory = device.memory_bytes
            if memory is not None and not device.says_reserved and headroom.nbytes >= memory:
                raise UserError(
                    f"--headroom {format_bytes(headroom.nbytes)}: {device.name} has "
                    f"{format_bytes(memory)} in all; give less"
                )
        devices = tuple(
            device if device.says_reserved else msgspec.structs.replace(device, **headroom.fields)
            for device in self.devices
        )
        return msgspec.structs.replace(self, devices=devices)

    def tightest(self, devices: Iterable[int]) -> Device | None:
        """Of these devices the one with the least memory for stages; None: none has a limit."""
        limited = [self.devices[d] for d in devices if self.devices[d].memory_bytes is not None]
        return min(limited, key=lambda device: device.usable_bytes or 0, default=None)

    @property
    def networks(self) -> tuple[Network, ...]:
        """The different links that there are between any two devices; `network` where none is."""
        return _networks(self)

    @property
    def overlap(self) -> bool:
        """Whether transfers over some link run beside computing."""
        return any(link.overlap for link in self.networks)

    @property
    def fastest_bytes_per_s(self) -> float:
        """Bytes over the fastest link, of messages of any size."""
        return max(link.top_bytes_per_s for link in self.networks)

    def like(self, d: int) -> Hashable:
        """What a device is like: what is `alike` of it, and what tells its links from others'.
        Devices of one machine with the same are alike, and so are machines whose are."""
        device = self.devices[d]
        if not self.links:
            return device.alike
        named = {end for each in self.links for end in each.between}
        all_names = device.name, device.machine, device.group
        names = tuple(name if name in named else None for name in all_names)
        return device.alike, names

    def paces(self, devices: Sequence[int]) -> tuple[float, ...]:
        """For each of some devices, its times as a share of those of the slowest of them."""
        speeds = [self.devices[d].speed for d in devices]
        return tuple(min(speeds) / speed for speed in speeds)

    def link(self, a: int, b: int) -> Network:
        """The link between devices `a` and `b`, the same in both directions."""
        if self.links:
            found = self._own_link(a, b)
            if found is not None:
                return found[1].network
        return self._link(self.devices[a].machine != self.devices[b].machine)

    def _own_link(self, a: int, b: int) -> tuple[tuple[int, int], LinkBetween] | None:
        """Of `links` the one that names the two most exactly, of several the first; its rank."""
        here, there, found = self.devices[a], self.devices[b], None
        for each in self.links:
            rank = each.rank(here, there)
            if rank is not None and (found is None or rank > found[0]):
                found = rank, each
        return found

    def _link(self, between: bool) -> Network:
        return self.between_machines if between and self.between_machines else self.network

    def wire(self, a: int, b: int) -> Hashable:
        """What a message from device `a` to device `b` keeps busy: equal wires take turns.

        Inside a machine each ordered pair of devices has a wire of its own, and so has one that a
        link names. Between machines all devices share one for each ordered pair of machines. A
        half-duplex wire is that of both directions.
        """
        here, there = self.devices[a].machine or "", self.devices[b].machine or ""
        own = self._own_link(a, b) if self.links else None
        half_duplex = self.link(a, b).half_duplex
        if here == there or (own is not None and own[0] == (4, 4)):
            return (min(a, b), max(a, b)) if half_duplex else (a, b)
        if half_duplex:
            return min(here, there), max(here, there)
        return here, there

    @property
    def sums(self) -> tuple[AllReduce, ...]:
        """The all-reduces that were measured."""
        found = self.all_reduce
        return () if found is None else found if isinstance(found, tuple) else (found,)

    def measured_sum(self, count: int) -> AllReduce | None:
        """That over so many processes; None: it wasn't measured."""
        return next((each for each in self.sums if each.processes == count), None)

    def all_reduce_s(self, devices: Sequence[int], nbytes: float) -> float:
        """Seconds until each of `devices` has the sum of their tensors of `nbytes` bytes.

        As measured where that was for as many processes. Else of a ring of r devices, which takes
        2 (r - 1) steps, in each of which every device passes 1 / r of the bytes on: no all-reduce
        sends fewer bytes (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
        clusters of workstations", J. Parallel Distrib. Comput. 69(2)). The ring passes through
        each machine once, as theirs does, so that no two of its messages share a wire in one
        direction. Half duplex, the wire takes twice as long: once in each direction. A step takes
        the longest latency and the longest time on the wire among the ring's links.
        """
        count = len(devices)
        if count < 2:
            return 0.0
        measured = self.measured_sum(count)
        if measured is not None:
            return measured.seconds(nbytes)
        links = self.ring(devices)
        latency_s = max(link.latency_s for link in links)
        if any(link.times for link in links):
            part = nbytes / count
            wire_s = max(link.wire_s(part) * (2 if link.half_duplex else 1) for link in links)
            return 2 * (count - 1) * (latency_s + wire_s)
        wire_s = max(link.wire_s(nbytes) * (2 if link.half_duplex else 1) for link in links)
        return 2 * (count - 1) * (latency_s + wire_s / count)

    def ring(self, devices: Sequence[int]) -> Sequence[Network]:
        """Links of an all-reduce's ring, through machines as they come first among the devices."""
        if self.links:
            homes: dict[str | None, list[int]] = {}
            for d in devices:
                homes.setdefault(self.devices[d].machine, []).append(d)
            ring = [*chain.from_iterable(homes.values())]
            return [self.link(a, b) for a, b in pairwise([*ring, ring[0]])]
        machines = len({self.devices[k].machine for k in devices})
        links = [self._link(True)] if machines > 1 else []
        if machines < len(devices):
            links.append(self.network)
        return links


@lru_cache(maxsize=64)
def _networks(cluster: Cluster) -> tuple[Network, ...]:
    """As `Cluster.networks`: between two devices of each machine that are alike, and two machines
    that are. Where links have names, `network` may be one more than there are."""
    alike = Counter[Hashable]()
    machines: dict[Hashable, list[str | None]] = {}
    chosen = []
    for d, device in enumerate(cluster.devices):
        like = cluster.like(d)
        homes = machines.setdefault(like, [])
        if device.machine not in homes and len(homes) < 2:
            homes.append(device.machine)
        alike[like, device.machine] += 1
        if device.machine in homes and alike[like, device.machine] <= 2:
            chosen.append(d)
    several = len({device.machine for device in cluster.devices}) < len(cluster.devices)
    found = dict.fromkeys([cluster.network] if several or len(cluster.devices) < 2 else [])
    found |= dict.fromkeys(cluster.link(a, b) for a, b in combinations(chosen, 2))
    return tuple(found)


DEVICES = "Devices and links"
"""Heading of the options' help."""


@dataclass(frozen=True, kw_only=True)
class EqualDevices:
    """Devices and their links, as options. None, False and True are the defaults."""

    devices: Annotated[int | str | None, Option(DEVICES, usual="2", metavar="N|KIND:N")] = None
    """Number of equal devices; or of kinds known by their data sheets: a100-80gb:8x2 is 8 in each
    of 2 machines, h100-80gb:4+a100-80gb:4 a machine of each."""
    memory: Annotated[str | float | None, Option(DEVICES, usual="none, or the data sheet's")] = None
    """Limit of each device, like 16GiB."""
    bandwidth: Annotated[
        str | float | None, Option(DEVICES, usual=f"{DEFAULT_BANDWIDTH}, or the data sheet's")
    ] = None
    """Between devices."""
    latency: Annotated[str | float | None, Option(DEVICES, usual=DEFAULT_LATENCY)] = None
    """Of a message."""
    per_machine: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_DEVICES)] | None, Option(DEVICES, usual="all")
    ] = None
    """Devices in a machine."""
    between_bandwidth: Annotated[
        str | float | None,
        Option(DEVICES, usual="--bandwidth", flags=("--between", "--between-bandwidth")),
    ] = None
    """Between machines."""
    between_latency: Annotated[str | float | None, Option(DEVICES, usual="--latency")] = None
    """Between machines."""
    half_duplex: Annotated[bool, Option(DEVICES)] = False
    """A link carries one direction at a time."""
    overlap: Annotated[bool, Option(DEVICES)] = True
    """Devices compute while they transfer."""

    @property
    def described(self) -> dict[str, Any]:
        """What was given, by field."""
        given = {f.name: (getattr(self, f.name), f.default) for f in fields(EqualDevices)}
        return {name: value for name, (value, default) in given.items() if value is not default}

    @property
    def names_kinds(self) -> bool:
        """Whether the devices are of kinds that have data sheets (`catalogue`)."""
        return isinstance(self.devices, str) and not self.devices.isdecimal()

    def equal(self, spelled: Spelled = str) -> Cluster:
        """That cluster; without `per_machine` all are in one machine, else the last has the rest.

        Args:
            spelled: what messages call a field.

        Raises UserError naming what can't be read, or can't be.
        """
        count = self._count("devices", spelled) or 2
        each, memory_bytes = self._count("per_machine", spelled), self.memory_bytes(spelled)
        links = self.equal_links({}, each is not None and each < count, spelled)
        homes = [f"machine{k // each}" if each else None for k in range(count)]
        devices = tuple(
            Device(name=f"device{k}", memory_bytes=memory_bytes, machine=home)
            for k, home in enumerate(homes)
        )
        return msgspec.structs.replace(links, devices=devices)

    def memory_bytes(self, spelled: Spelled) -> int | None:
        """Of each device; None: nothing was said. Raises UserError naming the field."""
        if self.memory is None or (isinstance(self.memory, str) and not self.memory):
            return None
        found = parse_memory(cast("str", self.memory), spelled("memory"))
        if found < 1:
            raise UserError(f"{spelled('memory')}: must be more than 0, not {self.memory!r}")
        return found

    def equal_links(self, usual: Mapping[str, Any], several: bool, spelled: Spelled) -> Cluster:
        """A cluster of one device with these links.

        Args:
            usual: of the fields that aren't given, where it isn't as everywhere.
            several: there are several machines.

        Raises UserError naming the field.
        """
        far = (self.between_bandwidth, self.between_latency) != (None, None)
        if far and not several:
            raise UserError(
                f"{spelled('per_machine')}: say how many devices a machine has, fewer than all, "
                "to give links between"
            )
        usual = {"bandwidth": DEFAULT_BANDWIDTH, "latency": DEFAULT_LATENCY, **usual}
        return Cluster(
            devices=(Device(name="device"),),
            network=self._network(("bandwidth", "latency"), usual, spelled),
            between_machines=self._network(("between_bandwidth", "between_latency"), usual, spelled)
            if far
            else None,
        )

    def _count(self, name: str, spelled: Spelled) -> int | None:
        value = getattr(self, name)
        short = isinstance(value, str) and value.isdecimal() and value.isascii() and len(value) < 10
        found = int(value) if short else whole_number(value)
        if value is not None and (found is None or not 1 <= found <= MAX_DEVICES):
            what = f"give a whole number from 1 to {MAX_DEVICES}, not {shown(value)}"
            raise UserError(f"{spelled(name)}: {what}")
        return found

    def _network(
        self, names: tuple[str, str], usual: Mapping[str, Any], spelled: Spelled
    ) -> Network:
        """Links of these fields, or of those in a machine where one isn't given."""

        def amount(name: str) -> tuple[Any, str]:
            value, near = getattr(self, name), name.removeprefix("between_")
            if value is None and near != name and name not in usual:
                return amount(near)
            return usual[name] if value is None else value, spelled(name)

        bandwidth, latency = map(amount, names)
        return Network(
            bandwidth_bytes_per_s=parse_bandwidth(*bandwidth),
            latency_s=parse_latency(*latency),
            half_duplex=truth(self.half_duplex, spelled("half_duplex")),
            overlap=truth(self.overlap, spelled("overlap")),
        )


def uniform_cluster(devices: int, *amounts: str | float | None, **links: Any) -> Cluster:
    """A cluster of equal devices.

    Args:
        amounts: memory, bandwidth and latency, as far as they are given.
        links: other fields of `EqualDevices`.

    Raises as `EqualDevices.equal`.
    """
    named = dict(zip(("memory", "bandwidth", "latency"), amounts, strict=False))
    asked: dict[str, Any] = {"devices": devices, **named, **links}
    return EqualDevices(**asked).equal()


# The cluster file: TOML as people write it (docs/cluster.md) → the fields of a cluster ------------

_Count = Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
_Amount = str | int | float
"""With its unit."""


class _Table(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A table of the file."""


class _Devices(_Table):
    """So many alike. Without a name they are numbered; `per_machine` of them share one."""

    name: str | None = None
    memory: _Amount | None = None
    reserved: _Amount | None = None
    speed: _Speed = 1.0
    count: _Count = 1
    machine: Annotated[str, Meta(min_length=1)] | None = None
    per_machine: _Count | None = None
    kind: Annotated[str, Meta(min_length=1)] | None = None
    group: Annotated[str, Meta(min_length=1)] | None = None


class _Timed(_Table):
    """What takes a latency and a bandwidth, or times by size: bytes, and seconds or bandwidth."""

    latency: _Amount | None = None
    bandwidth: _Amount | None = None
    times: tuple[tuple[_Amount, _Amount], ...] = ()


class _Link(_Timed):
    half_duplex: bool = False
    overlap: bool = True


class _LinkBetween(_Link, kw_only=True):
    between: tuple[str, str]


class _Sum(_Timed, kw_only=True):
    processes: Annotated[int, Meta(ge=2, le=MAX_DEVICES)]


class _ClusterFile(_Table):
    devices: Annotated[tuple[_Devices, ...], Meta(min_length=1)]
    network: _Link = msgspec.field(default_factory=_Link)
    between_machines: _Link | None = None
    all_reduce: _Sum | tuple[_Sum, ...] | None = None
    links: tuple[_LinkBetween, ...] = ()


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster from TOML (docs/cluster.md has examples).

    Raises FileError or UserError naming the file and the field.
    """
    path = Path(path)
    table = read_toml(path, "describe the cluster there, or use flags")
    if "cores" in table:
        raise FileError(
            f"{path}: unknown field 'cores'; plan several stages for a device instead: tp-plan "
            "solve --stages-per-device"
        )
    found = converted(table, _ClusterFile, str(path))
    devices = _read_devices(found.devices, str(path))
    if found.between_machines is not None and devices[0].machine is None:
        raise FileError(f"{path}: between_machines: give each of [[devices]] its machine")
    near, far = found.network, found.between_machines
    if len(devices) > 1 and near.bandwidth is None and not near.times:
        warnings.warn(
            f"{path}: network: says no bandwidth, so that links have {DEFAULT_BANDWIDTH}; plans "
            "depend on it: give it, or measure it (tp-profile --links)",
            TaskWarning,
            stacklevel=2,
        )
    if not near.times:
        near.latency = DEFAULT_LATENCY if near.latency is None else near.latency
        near.bandwidth = DEFAULT_BANDWIDTH if near.bandwidth is None else near.bandwidth
    links = tuple(
        LinkBetween(
            between=_ends(link.between, devices, f"{path}: links[{k}].between"),
            network=_read_link(link, f"{path}: links[{k}]"),
        )
        for k, link in enumerate(found.links)
    )
    return Cluster(
        devices=devices,
        network=_read_link(near, f"{path}: network"),
        between_machines=None if far is None else _read_link(far, f"{path}: between_machines"),
        all_reduce=_read_sums(found.all_reduce, f"{path}: all_reduce"),
        links=links,
    )


def _ends(names: tuple[str, str], devices: Sequence[Device], where: str) -> tuple[str, str]:
    """Raises FileError for an end that isn't there, or may mean several things."""
    known: dict[str, set[str | None]] = {
        "a device": {device.name for device in devices},
        "a machine": {device.machine for device in devices},
        "a group": {device.group for device in devices},
    }
    for name in names:
        found = [what for what, each in known.items() if name in each]
        if len(found) > 1:
            raise FileError(f"{where}: {name!r} is {' and '.join(found)}; rename one")
        if not found and name != ANY:
            raise FileError(
                f"{where}: no device, machine or group is called {name!r}; * is any other machine"
            )
    return names


def _read_sums(
    given: _Sum | Sequence[_Sum] | None, where: str
) -> AllReduce | tuple[AllReduce, ...] | None:
    if given is None:
        return None
    if isinstance(given, _Sum):
        return AllReduce(processes=given.processes, **_costs(given, where))
    found = tuple(
        AllReduce(processes=each.processes, **_costs(each, f"{where}[{k}]"))
        for k, each in enumerate(given)
    )
    twice = [n for n, count in Counter(each.processes for each in found).items() if count > 1]
    if twice:
        raise FileError(f"{where}: {twice[0]} processes are there twice")
    return found


def _read_devices(entries: Sequence[_Devices], path: str) -> tuple[Device, ...]:
    devices: list[Device] = []
    machines, names = set[str](), set[str]()
    for k, entry in enumerate(entries):
        where = f"{path}: devices[{k}]"
        given: dict[str, Any] = {"speed": entry.speed, "kind": entry.kind, "group": entry.group}
        if entry.memory is not None:
            given["memory_bytes"] = parse_memory(str(entry.memory), f"{where}.memory")
        if entry.reserved is not None:
            given |= _reserved(entry.reserved, given, f"{where}.reserved")
        homes = _machines_of(where, entry, machines)
        if k and (homes[0] is None) != (devices[0].machine is None):
            raise FileError(f"{where}.machine: name the machine of all devices or of none")
        for home in homes:
            name = "device" if entry.name is None else entry.name
            if entry.count > 1 or entry.name is None:
                name += str(len(devices))
            if name in names:
                raise FileError(f"{where}.name: another device is {name!r} too; give another name")
            names.add(name)
            devices.append(converted({**given, "name": name, "machine": home}, Device, where))
    return tuple(devices)


def _reserved(value: _Amount, device: dict[str, Any], where: str) -> dict[str, Any]:
    given = parse_headroom(value, where)
    if given.nbytes and given.nbytes >= device.get("memory_bytes", MAX_BYTES):
        raise FileError(f"{where}: {value!r} is all of its memory; give less")
    return given.fields


def _machines_of(where: str, entry: _Devices, known: set[str]) -> list[str | None]:
    """The machine of each of an entry's devices; `known` holds all names so far, and grows."""
    each, base = entry.per_machine, entry.machine
    if each is None:
        known.update([base] if base else [])
        return [base] * entry.count
    base, before = base or "machine", len(known)
    names = [f"{base}{before + k}" for k in range(-(-entry.count // each))]
    taken = next((name for name in names if name in known), None)
    if taken:
        raise FileError(f"{where}.machine: {taken!r} is there already; give another name")
    known.update(names)
    return [names[k // each] for k in range(entry.count)]


def _read_link(link: _Link, where: str) -> Network:
    return Network(half_duplex=link.half_duplex, overlap=link.overlap, **_costs(link, where))


def _costs(link: _Timed, where: str) -> dict[str, Any]:
    """Latency, bandwidth and times. Raises FileError and UserError naming the field."""
    if link.times:
        return _by_size(link, where)
    for name, value in (("latency", link.latency), ("bandwidth", link.bandwidth)):
        if value is None:
            raise FileError(f"{where}.{name}: is missing; or give times by size")
    return {
        "bandwidth_bytes_per_s": parse_bandwidth(str(link.bandwidth), f"{where}.bandwidth"),
        "latency_s": parse_latency(str(link.latency), f"{where}.latency"),
    }


def _by_size(link: _Timed, where: str) -> dict[str, Any]:
    if link.bandwidth is not None:
        raise FileError(f"{where}.bandwidth: leave it out; times say it")
    times = []
    for k, (size, value) in enumerate(link.times):
        at = f"{where}.times[{k}]"
        nbytes = parse_bytes(str(size), at)
        if not nbytes:
            raise FileError(f"{at}: give sizes of a byte or more")
        text = str(value)
        rate = "/s" in text or text.endswith("ps")
        seconds = nbytes / parse_bandwidth(text, at) if rate else parse_seconds(text, at)
        times.append((nbytes, seconds))
    latency = link.latency
    latency_s = None if latency is None else parse_latency(str(latency), f"{where}.latency")
    try:
        return costs_by_size(times, latency_s, most=1.0)
    except ValueError as error:
        raise FileError(f"{where}.{error}") from None
