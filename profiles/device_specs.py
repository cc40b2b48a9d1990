"""Device specs: what a data sheet says of a device, shipped or from a user's TOML file.

A shipped spec gives a lower bound on time: no kernel reaches the peaks of a data sheet, and real
runs are slower. A user's file may say which share of them real kernels reach::

    name = "A100, as our kernels use it"
    memory_bytes = "80GB"
    memory_bandwidth_bytes_per_s = "2039GB/s"
    peak_flops_per_s = { float32 = 19.5e12, tf32 = 156e12, bfloat16 = 312e12 }
    launch_s = "5us"
    source = "data sheet; shares measured on large matrix products and copies"
    matmul = "tf32"
    compute_efficiency = 0.7
    memory_efficiency = 0.85
    link = { name = "NVLink 3", bandwidth_bytes_per_s = "300GB/s", latency_s = "10us" }
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .errors import FileError
from .files import MAX_BYTES, converted, is_file, read_toml
from .units import parse_bandwidth, parse_bytes, parse_seconds

Rate = Annotated[float, Meta(ge=1e6, le=1e24)]
Share = Annotated[float, Meta(ge=1e-6, le=1)]

_SHIPPED = Path(__file__).with_name("device_specs.toml")
_UNITS: dict[str, Callable[[str, str], float]] = {
    "memory_bytes": parse_bytes,
    "memory_bandwidth_bytes_per_s": parse_bandwidth,
    "bandwidth_bytes_per_s": parse_bandwidth,
    "launch_s": parse_seconds,
    "latency_s": parse_seconds,
}


class PeakFlops(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Dense floating-point operations per second, by dtype."""

    float32: Rate
    tf32: Rate | None = None
    """float32 tensors on the matrix units, rounded to TF32; None: the device has no such mode."""
    float16: Rate | None = None
    """None, here and below: no units of its own, reckoned at the peak of float32."""
    bfloat16: Rate | None = None


class DeviceLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a device sends to another one of its machine."""

    name: Annotated[str, Meta(min_length=1)]
    bandwidth_bytes_per_s: Rate
    """In one direction, by the data sheet."""
    share: Share = 1.0
    """Of it, as measured."""
    latency_s: Annotated[float, Meta(ge=0, le=1)]
    """Of a message: an assumption, not from a data sheet."""


class DeviceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One device by its data sheet."""

    name: Annotated[str, Meta(min_length=1)]
    memory_bytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)]
    memory_bandwidth_bytes_per_s: Rate
    peak_flops_per_s: PeakFlops
    launch_s: Annotated[float, Meta(ge=0, le=1)]
    """Seconds that starting a kernel costs: an assumption, not from a data sheet."""
    source: Annotated[str, Meta(min_length=1)]
    """Where the figures are printed."""
    matmul: Literal["float32", "tf32"] = "float32"
    """"tf32": float32 matrix products and convolutions go at that peak, whatever torch's flags."""
    compute_efficiency: Share = 1.0
    """Share of the peak that matrix products and convolutions reach."""
    memory_efficiency: Share = 1.0
    """Share of the bandwidth that kernels reach."""
    link: DeviceLink | None = None
    link_source: str = ""
    matmul_share: Share | None = None
    """Share of the peak of bfloat16 that large matrix products were measured to reach; it counts
    where kinds of devices are compared. None: nothing public."""
    matmul_source: str = ""
    cuda_name: str = ""
    """As torch.cuda.get_device_name says it, without "NVIDIA" and "Tesla"."""

    def rates(self, dtype: str) -> tuple[float, float]:
        """Operations of matrix products in a dtype, and bytes of memory, per second at most."""
        peak = self.peak_flops_per_s
        low = {"float16": peak.float16, "bfloat16": peak.bfloat16}.get(dtype)
        wide = peak.tf32 if self.matmul == "tf32" and peak.tf32 else peak.float32
        flops = (low or wide) * self.compute_efficiency
        return flops, self.memory_bandwidth_bytes_per_s * self.memory_efficiency


def spec_of_gpu(cuda_name: str) -> DeviceSpec | None:
    """The shipped device that CUDA calls so; None: there is none."""
    name = cuda_name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    shipped = read_toml(_SHIPPED, "")
    found = next((key for key, table in shipped.items() if table["cuda_name"] == name), None)
    return load_spec(found) if found else None


def load_spec(name_or_path: str) -> DeviceSpec:
    """A shipped device by its name (in any case; its beginning, where no other has that), or the
    spec in a TOML file of the user's.

    Raises FileError naming the file and the field, or the known names.
    """
    shipped = read_toml(_SHIPPED, "")
    name = name_or_path.strip().lower()
    longer = [key for key in shipped if name and key.startswith(name)]
    if name in shipped or len(longer) == 1:
        name = name if name in shipped else longer[0]
        return _spec(shipped[name], f"device {name!r}")
    path = Path(name_or_path)
    if path.suffix.lower() != ".toml" and not is_file(path):
        if longer:
            raise FileError(f"device {name_or_path!r}: may be {' or '.join(longer)}")
        raise FileError(
            f"no device {name_or_path!r}: give one of {', '.join(sorted(shipped))}, or a TOML "
            "file with the same fields"
        )
    return _spec(read_toml(path, "describe the device there"), str(path))


def _spec(table: Mapping[str, Any], where: str) -> DeviceSpec:
    if not isinstance(table, Mapping):
        raise FileError(f"{where}: must be a table")
    fields = _with_units(table, f"{where}: ")
    if isinstance(fields.get("link"), Mapping):
        fields["link"] = _with_units(fields["link"], f"{where}: link.")
    # TOML writes 80e9 as a float.
    memory = fields.get("memory_bytes")
    if isinstance(memory, float) and memory.is_integer():
        fields["memory_bytes"] = int(memory)
    spec = converted(fields, DeviceSpec, where)
    if spec.matmul == "tf32" and spec.peak_flops_per_s.tf32 is None:
        raise FileError(f"{where}: matmul: tf32 needs a peak_flops_per_s.tf32")
    return spec


def _with_units(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {
        field: _UNITS[field](value, f"{where}{field}")
        if field in _UNITS and isinstance(value, str)
        else value
        for field, value in table.items()
    }
