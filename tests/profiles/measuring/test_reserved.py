"""What a process takes of a GPU besides tensors, measured where the CPU plays its part."""

from __future__ import annotations

import pytest
import torch
from timeprest.profiles.measuring import platforms
from timeprest.profiles.measuring.platforms import Platform, Reserved

MIB = 2**20


@pytest.fixture
def gpu(monkeypatch):
    """A card of 1000 MiB; `use` is what the driver and torch say of it."""
    use = {"others": 100, "kernels": 50, "reserved": 20, "allocated": 10, "workspaces": 8}

    def info():
        taken = use["others"] + use["kernels"] + use["reserved"]
        return (1000 - taken) * MIB, 1000 * MIB

    def clear():
        use["allocated"] -= use.pop("workspaces")

    cuda = {
        "device": lambda _: torch.no_grad(),
        "current_device": lambda: 0,
        "mem_get_info": info,
        "memory_reserved": lambda: use["reserved"] * MIB,
        "memory_allocated": lambda: use["allocated"] * MIB,
        "max_memory_reserved": lambda: 500 * MIB,
        "max_memory_allocated": lambda: 400 * MIB,
    }
    cuda |= dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "synchronize"), lambda: None)
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    monkeypatch.setattr(platforms, "_AT_FIRST", {0: 120 * MIB})
    return use


CARD = Platform("cuda", torch.device("cuda"))


def test_it_is_context_kernels_workspaces_and_the_allocators(gpu, monkeypatch):
    monkeypatch.setattr(platforms, "_bare_context", lambda: 300 * MIB)
    steps = []
    found = CARD.reserved(lambda: steps.append(1))
    # A context; what came since then; cuBLAS's; the allocator's pieces.
    assert found == Reserved((300 + 30 + 8 + 64) * MIB, 36 / 400)
    assert len(steps) == 3


@pytest.mark.processes
def test_without_a_second_context_nothing_is_said(gpu):
    assert CARD.reserved(lambda: None) is None


def test_a_context_is_what_the_driver_counts_less_tensors(gpu, monkeypatch):
    code = "print(2 * 2**20, flush=True); import sys; sys.stdin.read()"
    monkeypatch.setattr(platforms, "_BARE", code)
    left = iter([(800 * MIB, 1000 * MIB), (500 * MIB, 1000 * MIB)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: next(left))
    assert platforms._bare_context.__wrapped__() == 298 * MIB


def test_on_the_cpu_there_is_none():
    assert Platform("cpu", torch.device("cpu")).reserved(lambda: None) is None
