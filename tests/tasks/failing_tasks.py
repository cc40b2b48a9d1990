"""A task whose optimizer fails at its 5th step on one rank; the environment says where and how."""

from __future__ import annotations

import builtins
import ctypes
import os
import resource
import signal
import time
from pathlib import Path

import torch
from mlp_task import MLPTask


def _trap() -> tuple[str, str, float]:
    """How and in which rank it goes off, and how many seconds late the others are.

    From a file in the folder at hand, or the environment: where that is another, processes are
    forked from another one, which has to load torch first.
    """
    file = Path("trap.txt")
    text = os.environ["TRAP"] if "TRAP" in os.environ else file.read_text()
    how, rank, late_s = f"{text}:0".split(":")[:3]
    return how, rank, float(late_s)


class _TrapSGD(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        how, rank, late_s = _trap()
        if self.steps == 5 and os.environ.get("RANK") == rank:
            if how == "raise":
                raise ValueError("the trap went off")
            if how == "exit":
                os._exit(3)
            if how == "hold":
                # A long call that lets no other thread of this process run.
                ctypes.PyDLL(None).sleep(100)
            if hasattr(builtins, how):
                raise getattr(builtins, how)(2)
            if how == "full":
                # Nothing can be written from here on, as where the disk is full.
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
                return super().step(closure)
            os.kill(os.getpid(), getattr(signal, how))
        if self.steps == 5:
            # The others come later to where they need it.
            time.sleep(late_s)
        return super().step(closure)


class TrapTask(MLPTask):
    """The MLP with a trap in its optimizer."""

    def optimizer(self, parameters):
        return _TrapSGD(parameters, lr=0.05)


class LossTakesAll(MLPTask):
    """Its 10th loss asks for more than any machine has."""

    calls = 0

    def loss(self, output, target):
        self.calls += 1
        if self.calls == 10:
            torch.empty(2**57, dtype=torch.uint8)
        return super().loss(output, target)


class NotesEnvironment(MLPTask):
    """Writes down all environment variables that a task's code is shown, in the folder at hand."""

    def optimizer(self, parameters):
        with Path("seen").open("a") as file:
            file.write(f"{dict(os.environ)}\n")
        return super().optimizer(parameters)


class GoesElsewhere(MLPTask):
    """Its data are read in another folder, below the one at hand."""

    def data(self, split):
        if Path("elsewhere").exists():
            os.chdir("elsewhere")
        return super().data(split)


class OtherDefault(MLPTask):
    """Makes numbers of another kind, where it has the last layer."""

    def optimizer(self, parameters):
        parameters = list(parameters)
        if any(p.shape == (3, 4) for p in parameters):
            torch.set_default_dtype(torch.float64)
        return super().optimizer(parameters)
