"""A task whose optimizer fails at its 5th step on one rank; the environment says where and how."""

from __future__ import annotations

import builtins
import ctypes
import os
import resource
import signal
import time

import torch
from mlp_task import MLPTask


class _TrapSGD(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        how, rank = os.environ["TRAP"].split(":")
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
            time.sleep(float(os.environ.get("LATE_S", "0")))
        return super().step(closure)


class TrapTask(MLPTask):
    """The MLP with a trap in its optimizer."""

    def optimizer(self, parameters):
        return _TrapSGD(parameters, lr=0.05)
