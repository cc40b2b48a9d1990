"""The cluster file: TOML as people write it (docs/files.md) → the fields of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...profiles.errors import FileError
from ...profiles.files import read_toml
from ...profiles.units import parse_bandwidth, parse_bytes, parse_seconds

# What gloo gives between two processes of one machine.
DEFAULT_BANDWIDTH = "4GB/s"
DEFAULT_LATENCY = "50us"

MAX_DEVICES = 65536

_DEVICE = {"name", "memory", "speed", "count", "machine", "per_machine"}
_NETWORK = {"bandwidth", "latency", "half_duplex", "overlap"}


def read_fields(path: Path) -> dict[str, Any]:
    """The cluster in the file as plain fields, amounts in bytes, seconds and bytes per second.

    Raises FileError or UserError naming the file and the field.
    """
    found = read_toml(path, "describe the cluster there, or use flags")
    known = ("devices", "network", "between_machines", "all_reduce", "cores")
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise FileError(f"{path}: unknown table {unknown[0]!r}; known: {', '.join(known)}")
    built: dict[str, Any] = {"devices": _devices(path, found.get("devices"))}
    network = _table(path, "network", found.get("network", {}), _NETWORK)
    defaults = {"bandwidth": DEFAULT_BANDWIDTH, "latency": DEFAULT_LATENCY}
    built["network"] = _network(path, "network", defaults | network)
    if "between_machines" in found:
        if "machine" not in built["devices"][0]:
            raise FileError(f"{path}: between_machines: give each of [[devices]] its machine")
        table = _table(path, "between_machines", found["between_machines"], _NETWORK)
        built["between_machines"] = _network(path, "between_machines", table)
    if "cores" in found:
        built["cores"] = _whole(found["cores"], f"{path}: cores")
    if "all_reduce" in found:
        built["all_reduce"] = _all_reduce(path, found["all_reduce"])
    return built


def _devices(path: Path, listed: Any) -> list[dict[str, Any]]:
    if not isinstance(listed, list) or not listed:
        raise FileError(f"{path}: [[devices]]: give one or more devices")
    devices: list[dict[str, Any]] = []
    machines: set[str] = set()
    for k, entry in enumerate(listed):
        where = f"{path}: devices[{k}]"
        fields = _table(path, f"devices[{k}]", entry, _DEVICE)
        device: dict[str, Any] = {"speed": fields.get("speed", 1.0)}
        if "memory" in fields:
            device["memory_bytes"] = parse_bytes(str(fields["memory"]), f"{where}.memory")
        count = _whole(fields.get("count", 1), f"{where}.count")
        homes = _machines_of(where, fields, count, machines)
        if k and (homes[0] is None) != ("machine" not in devices[0]):
            raise FileError(f"{where}.machine: name the machine of all devices or of none")
        for home in homes:
            name = str(fields.get("name", "device"))
            if count > 1 or "name" not in fields:
                name += str(len(devices))
            devices.append({**device, "name": name} | ({"machine": home} if home else {}))
    return devices


def _machines_of(
    where: str, fields: dict[str, Any], count: int, known: set[str]
) -> list[str | None]:
    """The machine of each of an entry's devices; `known` holds all names so far, and grows."""
    if "per_machine" in fields:
        each = _whole(fields["per_machine"], f"{where}.per_machine")
        base = _name(fields.get("machine", "machine"), where)
        before = len(known)
        names = [f"{base}{before + k}" for k in range(-(-count // each))]
        taken = next((name for name in names if name in known), None)
        if taken:
            raise FileError(f"{where}.machine: {taken!r} is there already; give another name")
        known.update(names)
        return [names[k // each] for k in range(count)]
    if "machine" not in fields:
        return [None] * count
    name = _name(fields["machine"], where)
    known.add(name)
    return [name] * count


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise FileError(f"{where}.machine: give a name in quotes")
    return value


def _whole(value: Any, where: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_DEVICES:
        raise FileError(f"{where}: give a whole number from 1 to {MAX_DEVICES}")
    return value


def _all_reduce(path: Path, value: Any) -> dict[str, Any]:
    fields = _table(path, "all_reduce", value, {"processes", "latency", "bandwidth"})
    if "processes" not in fields:
        raise FileError(f"{path}: all_reduce.processes: is missing; or leave all_reduce out")
    processes = fields["processes"]
    if type(processes) is not int or not 2 <= processes <= MAX_DEVICES:
        raise FileError(
            f"{path}: all_reduce.processes: give a whole number from 2 to {MAX_DEVICES}"
        )
    return {"processes": processes, **_link(path, "all_reduce", fields)}


def _network(path: Path, where: str, fields: dict[str, Any]) -> dict[str, Any]:
    built: dict[str, Any] = dict(_link(path, where, fields))
    for name in ("half_duplex", "overlap"):
        if name in fields:
            if not isinstance(fields[name], bool):
                raise FileError(f"{path}: {where}.{name}: give true or false")
            built[name] = fields[name]
    return built


def _link(path: Path, where: str, fields: dict[str, Any]) -> dict[str, float]:
    missing = [name for name in ("latency", "bandwidth") if name not in fields]
    if missing:
        raise FileError(f"{path}: {where}.{missing[0]}: is missing; or leave {where} out")
    return {
        "bandwidth_bytes_per_s": parse_bandwidth(
            str(fields["bandwidth"]), f"{path}: {where}.bandwidth"
        ),
        "latency_s": parse_seconds(str(fields["latency"]), f"{path}: {where}.latency"),
    }


def _table(path: Path, where: str, value: Any, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FileError(f"{path}: {where}: must be a table")
    unknown = sorted(set(value) - known)
    if unknown:
        raise FileError(
            f"{path}: {where}: unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}"
        )
    return value
