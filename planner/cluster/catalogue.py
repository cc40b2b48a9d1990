"""Clusters of devices by their data sheets: ``a100-80gb:8x2`` is 8 in each of 2 machines. And of
devices of kinds that a profile has seconds of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

import msgspec

from ...profiles.device_specs import DeviceSpec, load_spec, spec_of_gpu
from ...profiles.errors import FileError, UserError
from ...profiles.options import Spelled
from ...profiles.profile import KindTimes, Profile
from ...profiles.units import format_seconds, parse_seconds
from .cluster import Cluster, Device, EqualDevices, LinkBetween
from .cluster_toml import write_bandwidth
from .headroom import GPU_SHARE, Headroom
from .links import MAX_DEVICES

BETWEEN_LATENCY = "20us"
"""Of a message between machines, by NCCL over InfiniBand or RoCE: an assumption."""

_PART = re.compile(
    r"(?P<kind>(?!\d+x\d+$)[^:]+)(?::(?P<count>\d{1,6})(?:x(?P<machines>\d{1,6}))?)?", re.IGNORECASE
)
_HOW = "a number of devices, or kinds: a100-80gb:8, or a100-80gb:8x2 (8 in each of 2 machines)"


@dataclass(frozen=True)
class _Kind:
    """So many of a device in each of so many machines."""

    name: str
    spec: DeviceSpec
    count: int
    machines: int


def cluster_of_kinds(
    asked: EqualDevices, profile: Profile, headroom: object, spelled: Spelled
) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster that `asked.devices` names kinds of, and lines on what was assumed.

    Memory and links in a machine are the data sheets', unless they are asked for.

    Args:
        headroom: None: of GPUs whose needs the profile hasn't measured, the usual is left free.
        spelled: what messages call a field.

    Raises UserError naming the field for what can't be read, or can't be.
    """
    what = spelled("devices")
    kinds = _parse(str(asked.devices), what)
    several = sum(kind.machines for kind in kinds) > 1
    if asked.per_machine is not None:
        raise UserError(f"{spelled('per_machine')}: leave it out; {what} {asked.devices} says it")
    if several and asked.between_bandwidth is None:
        raise UserError(
            f"{what} {asked.devices}: say how fast its machines are linked: "
            f"{spelled('between_bandwidth')} 100Gbit/s"
        )
    if not several and (asked.between_bandwidth, asked.between_latency) != (None, None):
        raise UserError(
            f"{what} {asked.devices}: is one machine, with no links between; "
            f"{kinds[0].name}:{kinds[0].count}x2 would be two"
        )
    speeds, notes = _speeds(kinds, profile)
    link_notes = _link_notes(kinds, asked, what)
    inside = [_inside(kind, asked, several, spelled) for kind in kinds]
    plain = next((each for each, k in zip(inside, kinds, strict=True) if k.count > 1), inside[0])
    memory = asked.memory_bytes(spelled)
    devices, links, machine = list[Device](), list[LinkBetween](), 0
    for kind, speed, mine in zip(kinds, speeds, inside, strict=True):
        for _ in range(kind.machines):
            home = f"machine{machine}" if several else None
            if home and kind.count > 1 and mine.network != plain.network:
                links.append(LinkBetween(between=(home, home), network=mine.network))
            devices += [
                Device(
                    name=f"{kind.name}-{len(devices) + k}",
                    memory_bytes=kind.spec.memory_bytes if memory is None else memory,
                    speed=speed,
                    machine=home,
                )
                for k in range(kind.count)
            ]
            machine += 1
    cluster = msgspec.structs.replace(plain, devices=tuple(devices), links=tuple(links))
    if headroom is None and profile.reserved_bytes is msgspec.UNSET:
        cluster = cluster.with_headroom(Headroom(share=GPU_SHARE))
    if several and asked.between_latency is None:
        late = format_seconds(parse_seconds(BETWEEN_LATENCY))
        link_notes.append(f"a latency of {late} between machines is assumed")
    return cluster, (*notes, *(["; ".join(link_notes)] if link_notes else []))


def _parse(text: str, what: str) -> list[_Kind]:
    kinds = []
    for part in re.split("[+,]", text):
        found = _PART.fullmatch(part.strip())
        count, machines = (int(found[n] or 1) if found else 0 for n in ("count", "machines"))
        if found is None or not count or not machines:
            raise UserError(f"{what} {text!r}: give {_HOW}")
        try:
            spec = load_spec(found["kind"])
        except FileError as error:
            how = "" if found["count"] else f"give {_HOW}; "
            raise UserError(f"{what}: {how}{error}") from None
        name = found["kind"].strip().lower().removesuffix(".toml")
        kinds.append(_Kind(name, spec, count, machines))
    total = sum(kind.count * kind.machines for kind in kinds)
    if total > MAX_DEVICES:
        raise UserError(f"{what} {text!r}: {total} devices; {MAX_DEVICES} at most")
    return kinds


# How fast they compute --------------------------------------------------------------------------


def relative_speed(spec: DeviceSpec, other: DeviceSpec, dtype: str) -> float:
    """How many times as fast as another device it is: half of that one's time goes by matrix
    products' peaks in this dtype, at the shares that were measured where both were, and half by
    memory bandwidth."""
    (flops, nbytes), (other_flops, other_bytes) = spec.rates(dtype), other.rates(dtype)
    compute = flops / other_flops
    low = dtype in ("float16", "bfloat16")
    if low and spec.matmul_share is not None and other.matmul_share is not None:
        compute *= spec.matmul_share / other.matmul_share
    return 2 / (1 / compute + other_bytes / nbytes)


def _speeds(kinds: Sequence[_Kind], profile: Profile) -> tuple[list[float], list[str]]:
    profiled_on = _spec_of(profile, kinds)
    first, dtype = kinds[0], profile.autocast or profile.dtype
    speeds = [
        float(f"{relative_speed(kind.spec, profiled_on or first.spec, dtype):.4g}")
        for kind in kinds
    ]
    told = {
        kind.name: f"{kind.name} {speed:.3g} × as fast"
        for kind, speed in zip(kinds, speeds, strict=True)
        if speed != 1
    }
    others = ", ".join(told.values())
    if told:
        others += f": half of the time by peaks in {dtype}, half by memory bandwidth"
    if profiled_on is not None:
        on = f"beside {profiled_on.name}, which the profile is of, counts "
        return speeds, [on + others] if told else []
    where = profile.device if profile.gpu is msgspec.UNSET else profile.gpu
    line = f"no data sheet is known of what the profile was made on ({where}): {first.name} counts "
    return speeds, [f"{line}as that" + (f", {others}" if others else "")]


def _spec_of(profile: Profile, kinds: Sequence[_Kind]) -> DeviceSpec | None:
    """Of the device that the profile was made on or reckoned with; None: it isn't known."""
    if profile.gpu is not msgspec.UNSET:
        return spec_of_gpu(profile.gpu)
    made_on, separator, name = profile.device.partition(":")
    if made_on != "meta" or not separator:
        return None
    for kind in kinds:
        # A file's is known by the name in it.
        if name in (kind.name, kind.spec.name):
            return kind.spec
    try:
        return load_spec(name)
    except FileError:
        return None


# How they are linked ----------------------------------------------------------------------------


def _inside(kind: _Kind, asked: EqualDevices, several: bool, spelled: Spelled) -> Cluster:
    """A device with a kind's links in a machine, and those between."""
    usual: dict[str, Any] = {"between_latency": BETWEEN_LATENCY}
    link = kind.spec.link
    if link is not None:
        usual["bandwidth"] = link.bandwidth_bytes_per_s * link.share
        usual["latency"] = link.latency_s
    return asked.equal_links(usual, several, spelled)


def _link_notes(kinds: Sequence[_Kind], asked: EqualDevices, what: str) -> list[str]:
    """What to say of links in a machine."""
    notes, latencies = dict[str, None](), set[float]()
    for kind in (kind for kind in kinds if kind.count > 1):
        link = kind.spec.link
        if link is None and asked.bandwidth is None:
            raise UserError(
                f"{what}: {kind.name}: its file has no link; add one, or give --bandwidth"
            )
        if link is None:
            continue
        latencies.add(link.latency_s)
        rate = write_bandwidth(link.bandwidth_bytes_per_s)
        whole = f"{link.share:.0%} of {rate}, as measured" if link.share < 1 else rate
        if asked.bandwidth is None:
            notes[f"{kind.name} by {link.name}: {whole}"] = None
    if latencies and asked.latency is None:
        late = " and ".join(map(format_seconds, sorted(latencies)))
        notes[f"a latency of {late} is assumed"] = None
    return [*notes]


# By what was measured on each kind --------------------------------------------------------------


def with_speeds(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster with the speed of each device's kind relative to the profile's first.

    Raises UserError for a device of another kind than the profile's, or of none beside others.
    """
    if all(device.kind is None for device in cluster.devices):
        return cluster
    known = profile.kinds or ()
    first_s = _whole_s(known[0]) if known else 0.0

    def with_speed(device: Device) -> Device:
        if device.kind_speed is not None:
            return device
        kind = next((kind for kind in known if kind.name == device.kind), None)
        if kind is None:
            has = ", ".join(kind.name for kind in known) or "no seconds of several kinds"
            raise UserError(f"{device.name}: kind: {device.kind or 'none'}: the profile has {has}")
        speed = float(f"{first_s / _whole_s(kind) if _whole_s(kind) and first_s else 1.0:.4g}")
        return msgspec.structs.replace(device, speed=device.speed * speed, kind_speed=speed)

    return msgspec.structs.replace(cluster, devices=tuple(map(with_speed, cluster.devices)))


def _whole_s(kind: KindTimes) -> float:
    """Of all layers, at the largest size."""
    return fsum(each[-1] for times in (kind.forward_s, kind.backward_s) for each in times)
