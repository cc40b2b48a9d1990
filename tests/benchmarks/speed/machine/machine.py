"""Facts about the machine, and versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

PACKAGES = ("torch", "numpy", "timeprest")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where something was measured, and with what."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    versions: dict[str, str]

    def is_like(self, other: Machine) -> bool:
        """Whether both are the same, but for what a kernel keeps of the memory for itself."""
        close = abs(self.memory_bytes - other.memory_bytes) <= 0.001 * other.memory_bytes
        return close and self == msgspec.structs.replace(other, memory_bytes=self.memory_bytes)


def machine() -> Machine:
    """This one."""
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_bytes=int(psutil.virtual_memory().total),
        system=f"{platform.system()} {platform.machine()}",
        versions={
            "Python": platform.python_version(),
            **{name: found for name in PACKAGES if (found := _version(name))},
        },
    )


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
