"""The oracle: forward and backward by hand in float64 NumPy, every weight version in a dict.

It shares nothing with the package: it takes an order as text and applies the table of training
systems literally. A run is right when it ends with the oracle's weights and used the oracle's
versions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

WORD = re.compile(r"(\d+)([FBU])(\d+)(?:\.(\d+))?")


class Momentum:
    """SGD with momentum: v ← μ·v + g, w ← w − η·v."""

    def __init__(self, lr=0.05, momentum=0.9):
        self.lr, self.momentum, self.v = lr, momentum, {}

    def step(self, name, w, g):
        self.v[name] = g if name not in self.v else self.momentum * self.v[name] + g
        return w - self.lr * self.v[name]


class Adam:
    """Adam with bias correction."""

    def __init__(self, lr=0.05, beta1=0.9, beta2=0.999, eps=1e-8):
        self.lr, self.betas, self.eps, self.state = lr, (beta1, beta2), eps, {}

    def step(self, name, w, g):
        m, v, t = self.state.get(name, (0.0, 0.0, 0))
        b1, b2 = self.betas
        m, v, t = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g, t + 1
        self.state[name] = (m, v, t)
        return w - self.lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + self.eps)


@dataclass
class OracleStage:
    """One stage's layers, its versions, and what it has in flight."""

    layers: list[str]
    versions: dict[int, dict[str, np.ndarray]]
    optimizer: object
    latest: int = 0
    first_version: dict[int, int] = field(default_factory=dict)
    used: dict[tuple[int, int], int] = field(default_factory=dict)
    saved: dict[tuple[int, int], list] = field(default_factory=dict)
    grads: dict[str, np.ndarray] = field(default_factory=dict)


class Oracle:
    """Runs an order on a chain of linear layers ("l…") and tanh ("t…") with a mean squared loss."""

    def __init__(self, variant, stages, weights, optimizer, batches):
        """
        Args:
            stages: per stage, names of its layers.
            weights: ``{"l0.weight": [out, in], "l0.bias": [out], …}``.
            optimizer: makes an optimizer for each stage.
            batches: per mini-batch, per micro-batch, (x, y).
        """
        self.variant = variant
        self.batches = batches
        self.micro_batches = len(batches[0])
        self.stages = [
            OracleStage(
                names,
                {0: {k: w.copy() for k, w in weights.items() if k.split(".")[0] in names}},
                optimizer(),
            )
            for names in stages
        ]
        self.activations = {}
        self.gradients = {}
        self.log = [[] for _ in stages]
        self.losses = []
        self.most_versions = [1 for _ in stages]

    def run(self, text):
        """Run an order: a line of operations for each stage."""
        lines = [line.split() for line in text.splitlines()]
        todo = [[WORD.fullmatch(word).groups() for word in line] for line in lines]
        while any(todo):
            moved = False
            for s, ops in enumerate(todo):
                if ops and self._ready(s, ops[0]):
                    self._execute(s, ops.pop(0))
                    moved = True
            assert moved, "the order can't be executed"
        return self

    def weights(self):
        """The latest weights of all stages."""
        return {k: w for stage in self.stages for k, w in stage.versions[stage.latest].items()}

    def _ready(self, s, word):
        _, kind, b, i = word
        b = int(b)
        if kind == "F":
            return s == 0 or (s, b, int(i)) in self.activations
        if kind == "B":
            micros = range(self.micro_batches) if i is None else [int(i)]
            return s == len(self.stages) - 1 or all((s, b, k) in self.gradients for k in micros)
        return True

    def _execute(self, s, word):
        _, kind, b, i = word
        stage, b = self.stages[s], int(b)
        if kind == "F":
            version = self._forward(s, b, int(i))
        elif kind == "B":
            # One pass over all micro-batches, or one micro-batch.
            micros = range(self.micro_batches) if i is None else [int(i)]
            versions = {self._backward(s, b, k) for k in micros}
            assert len(versions) == 1
            version = versions.pop()
        else:
            version = self._update(s)
        suffix = "" if i is None else f".{i}"
        self.log[s].append((f"{s}{kind}{b}{suffix}", version))
        # What a real system would have to hold: the latest, and what is still to be used.
        needed = {stage.latest}
        if self.variant == "pipedream":
            needed |= {v for key, v in stage.used.items() if key in stage.saved}
        if self.variant == "timeprest":
            begun = {k: n for k, n in self._begun(stage).items() if n < self.micro_batches}
            needed |= {stage.first_version[k] for k in begun}
        self.most_versions[s] = max(self.most_versions[s], len(needed))

    def _begun(self, stage):
        counts = {}
        for b, _ in stage.used:
            counts[b] = counts.get(b, 0) + 1
        return counts

    def _forward_version(self, stage, b):
        if self.variant == "timeprest":
            return stage.first_version.setdefault(b, stage.latest)
        assert self.variant in ("gpipe", "pipedream", "v-timeprest")
        return stage.latest

    def _backward_version(self, stage, b, i):
        if self.variant == "pipedream":
            return stage.used[b, i]
        assert self.variant in ("gpipe", "timeprest", "v-timeprest")
        return stage.latest

    def _forward(self, s, b, i):
        stage = self.stages[s]
        version = self._forward_version(stage, b)
        stage.used[b, i] = version
        weights = stage.versions[version]
        x = self.batches[b][i][0] if s == 0 else self.activations.pop((s, b, i))
        saved = []
        for name in stage.layers:
            if name.startswith("l"):
                saved.append(x)
                x = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
            else:
                x = np.tanh(x)
                saved.append(x)
        if s == len(self.stages) - 1:
            error = x - self.batches[b][i][1]
            self.losses.append((error**2).mean())
            # A micro-batch counts by its share of the mini-batch: 1 / N.
            self.gradients[s, b, i] = 2 * error / error.size / self.micro_batches
        else:
            self.activations[s + 1, b, i] = x
        stage.saved[b, i] = saved
        return version

    def _backward(self, s, b, i):
        stage = self.stages[s]
        version = self._backward_version(stage, b, i)
        weights = stage.versions[version]
        g = self.gradients.pop((s, b, i))
        saved = stage.saved.pop((b, i))
        for name, kept in zip(reversed(stage.layers), reversed(saved), strict=True):
            if name.startswith("t"):
                g = g * (1 - kept**2)
                continue
            for key, part in ((f"{name}.weight", g.T @ kept), (f"{name}.bias", g.sum(0))):
                stage.grads[key] = stage.grads.get(key, 0) + part
            g = g @ weights[f"{name}.weight"]
        if s:
            self.gradients[s - 1, b, i] = g
        return version

    def _update(self, s):
        stage = self.stages[s]
        old = stage.versions[stage.latest]
        stage.latest += 1
        stage.versions[stage.latest] = {
            key: stage.optimizer.step(key, w, stage.grads[key]) for key, w in old.items()
        }
        stage.grads = {}
        return stage.latest
