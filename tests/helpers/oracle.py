"""The oracle: forward and backward by hand in float64 NumPy, every weight version in a dict.

It shares nothing with the package: it takes an order as text and applies the table of training
systems literally, slowly and without any cleverness. A run is right when it ends with the oracle's
weights, made the oracle's losses, and used and held the oracle's versions.

s is a stage, b a mini-batch, i a micro-batch (None where an operation takes the whole mini-batch).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class System:
    """One row of the table: which weights each pass runs on.

    forward:  "latest"     the stage's latest at this very forward
              "entry"      the version that stage 0 had as its latest when this micro-batch entered
                           there; the stage's latest where it isn't that far yet, which can be only
                           where no gradient goes back to stage 0
              "first"      the same of the mini-batch's first micro-batch
              "predicted"  the stage's latest, moved to where it should be at the aim
    backward: "latest"     the stage's latest at this very backward
              "forward"    the very weights that the forward ran on
              "between"    between the forward's weights and the latest
              "corrected"  the latest, less its mean change for each update since the forward
              "predicted"  as above, from the latest at the backward
    aim:      the version predicted: the stage's when B(0,b) starts, or when its own B(s,b) does
    steps_by: what weights are predicted with: the gradients smoothed, or the optimizer's own step
    nesterov: the update looks ahead along the momentum, its gradient discounted
    split:    B makes the gradient of the stage's input, W those of its weights
    flushes:  no stage updates before all stages have the mini-batch's gradients
    """

    forward: str
    backward: str
    aim: str = ""
    steps_by: str = ""
    nesterov: bool = False
    split: bool = False
    flushes: bool = False


SYSTEMS = {
    "gpipe": System("latest", "latest", flushes=True),
    "pipedream-flush": System("latest", "latest", flushes=True),
    "zb-h1": System("latest", "latest", split=True, flushes=True),
    "interleaved-1f1b": System("latest", "latest", flushes=True),
    "zb-v": System("latest", "latest", split=True, flushes=True),
    "v-half": System("latest", "latest", split=True, flushes=True),
    "pipedream": System("latest", "forward"),
    "pipedream-nesterov": System("latest", "forward", nesterov=True),
    "pipedream-unstashed": System("entry", "latest"),
    "pipedream-vertical-sync": System("first", "forward"),
    "pipedream-2bw": System("first", "forward"),
    "pipemare": System("latest", "corrected"),
    "spectrain": System("predicted", "predicted", "B(0,b)", "smoothed gradient"),
    "pipeoptim": System("predicted", "latest", "B(s,b)", "optimizer's step"),
    "timeprest": System("entry", "latest"),
    "timeprest-stashed": System("entry", "forward"),
    "v-timeprest": System("latest", "latest"),
    "i-timeprest": System("entry", "between"),
}

SIGNIFICANCE = {
    "exponential": lambda d, rate: np.exp(-rate * d),
    "inverse": lambda d, rate: 1 / (1 + rate * d),
    "linear": lambda d, rate: max(0.0, 1 - rate * d),
}
"""σ(d): how much of a forward's weights is left in a backward d versions later."""


# Optimizers ----------------------------------------------------------------------------------


class SGD:
    """v ← μ·v + g, w ← w − η·v; the gradient takes weight decay in."""

    def __init__(self, lr=0.05, momentum=0.0, weight_decay=0.0):
        self.lr, self.momentum, self.weight_decay, self.v = lr, momentum, weight_decay, {}

    def _note(self, name, w, g):
        g = g + self.weight_decay * w
        self.v[name] = self.momentum * self.v[name] + g if name in self.v else g
        return g

    def step(self, name, w, g):
        self._note(name, w, g)
        return w - self.lr * self.v[name]

    def nesterov_step(self, name, w, g):
        g = self._note(name, w, g)
        return w - self.lr * (1 - self.momentum) * (g + self.momentum * self.v[name])

    def smoothed_gradient(self, name):
        return self.v[name]

    def direction(self, name, w):
        return self.v[name]

    def raise_momentum(self, share):
        self.momentum += share * (0.99 - self.momentum)


class Adam:
    """Adam with bias correction; weight decay in the gradient, or `decoupled` from it (AdamW)."""

    def __init__(self, lr=0.05, weight_decay=0.0, decoupled=False):
        self.lr, self.betas, self.eps = lr, (0.9, 0.999), 1e-8
        self.weight_decay, self.decoupled = weight_decay, decoupled
        self.m, self.v, self.t, self.mu_product = {}, {}, {}, {}

    def _note(self, name, w, g):
        if not self.decoupled:
            g = g + self.weight_decay * w
        b1, b2 = self.betas
        self.t[name] = self.t.get(name, 0) + 1
        self.m[name] = b1 * self.m.get(name, 0) + (1 - b1) * g
        self.v[name] = b2 * self.v.get(name, 0) + (1 - b2) * g * g
        return g

    def _root(self, name):
        return np.sqrt(self.v[name] / (1 - self.betas[1] ** self.t[name])) + self.eps

    def _decayed(self, w):
        return w - self.lr * self.weight_decay * w if self.decoupled else w

    def step(self, name, w, g):
        self._note(name, w, g)
        corrected = self.m[name] / (1 - self.betas[0] ** self.t[name])
        return self._decayed(w) - self.lr * corrected / self._root(name)

    def nesterov_step(self, name, w, g):
        """NAdam (Dozat 2016), its momentum warmed up by 0.96^(t·0.004)."""
        g = self._note(name, w, g)
        mu, mu_next = (
            self.betas[0] * (1 - 0.5 * 0.96 ** (t * 0.004))
            for t in (self.t[name], self.t[name] + 1)
        )
        # As torch does, the product of all μ is kept in single precision: 1e-8 in the weights.
        kept = self.mu_product[name] = self.mu_product.get(name, np.float32(1)) * np.float32(mu)
        product = float(kept)
        look = (1 - mu) * g / (1 - product) + mu_next * self.m[name] / (1 - product * mu_next)
        return self._decayed(w) - self.lr * look / self._root(name)

    def smoothed_gradient(self, name):
        return self.m[name]

    def direction(self, name, w):
        corrected = self.m[name] / (1 - self.betas[0] ** self.t[name])
        step = corrected / self._root(name)
        return step + self.weight_decay * w if self.decoupled else step

    def raise_momentum(self, share):
        b1, b2 = self.betas
        self.betas = (b1 + share * (0.99 - b1), b2)


def bfloat16(x):
    """Rounded to 8 bits, to nearest and to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def newton_schulz(g):
    """Five steps of x ← a·x + (b·s + c·s²)·x, s = x·xᵀ, in bfloat16: about U·Vᵀ of g's U·S·Vᵀ."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = bfloat16(g.T if g.shape[0] > g.shape[1] else g)
    x = bfloat16(x / max(bfloat16(np.linalg.norm(x)), 1e-7))
    for _ in range(5):
        s = bfloat16(x @ x.T)
        x = bfloat16(a * x + bfloat16(b * s + c * s @ s) @ x)
    return x.T if g.shape[0] > g.shape[1] else x


class Muon(Adam):
    """Nesterov momentum made orthogonal for `matrices`, AdamW for others; decoupled decay."""

    def __init__(self, lr=0.05, weight_decay=0.0, matrices=(), orthogonal=newton_schulz):
        super().__init__(lr, weight_decay, decoupled=True)
        self.matrices, self.orthogonal, self.momentum = matrices, orthogonal, 0.95

    def _scaled(self, m):
        return 0.2 * np.sqrt(max(m.shape)) * self.orthogonal(m)

    def step(self, name, w, g):
        if name not in self.matrices:
            return super().step(name, w, g)
        mu = self.momentum
        self.m[name] = mu * self.m.get(name, 0) + (1 - mu) * g
        return self._decayed(w) - self.lr * self._scaled(mu * self.m[name] + (1 - mu) * g)

    def direction(self, name, w):
        if name not in self.matrices:
            return super().direction(name, w)
        return self._scaled(self.m[name]) + self.weight_decay * w


# Orders --------------------------------------------------------------------------------------

WORD = re.compile(r"(\d+)([FBWU])(\d+)(?:\.(\d+))?")


def parse(text, first=0):
    """Per device, its operations as (s, kind, b, i); mini-batches are counted from `first`.

    A line is a device's. All operations of a stage stand in one line.
    """
    found, line_of = [], {}
    for d, line in enumerate(text.splitlines()):
        found.append([])
        for word in line.split():
            stage, kind, b, i = WORD.fullmatch(word).groups()
            assert line_of.setdefault(int(stage), d) == d
            op = kind, int(b) + first, None if i is None else int(i)
            found[d].append((int(stage), *op))
    return found


def by_stage(order):
    """Per stage, its operations as (kind, b, i), in the sequence of its device's."""
    found = [[] for _ in range(1 + max(op[0] for ops in order for op in ops))]
    for s, *op in (op for ops in order for op in ops):
        found[s].append(tuple(op))
    return found


def unit_clock(order):
    """Per stage, when each operation starts: F, B and W keep the device for one unit, U and
    messages take no time."""
    starts = [{} for _ in by_stage(order)]
    now = [0 for _ in order]
    left = [list(ops) for ops in order]
    while any(left):
        moved = False
        for d, ops in enumerate(left):
            if not ops:
                continue
            s, *op = ops[0]
            op = tuple(op)
            before = {"F": s - 1, "B": s + 1}.get(op[0], -1)
            if 0 <= before < len(starts):
                if op not in starts[before]:
                    continue
                now[d] = max(now[d], starts[before][op] + 1)
            starts[s][op] = now[d]
            now[d] += op[0] != "U"
            ops.pop(0)
            moved = True
        assert moved, "the order can't be executed"
    return starts


def distances(order, aim, by=None):
    """Per stage {b: k}: updates from the version at F(s,b), and at B(s,b), to the one aimed at.

    Args:
        by: per stage, the stage of its device whose updates are counted; its own by default.
    """
    starts = unit_clock(order)
    by = by or range(len(starts))
    updates = [[] for _ in starts]
    at = [{"F": {}, "B": {}} for _ in starts]
    for s, *op in (op for ops in order for op in ops):
        kind, b, _ = op
        if kind == "U":
            updates[s].append(starts[s][tuple(op)])
        elif kind in at[s]:
            at[s][kind].setdefault(b, len(updates[by[s]]))
    forward, backward = [], []
    for s, seen in enumerate(at):
        aims = seen["B"]
        if aim == "B(0,b)":
            # Updates at the very instant that it starts come too late.
            begins = {b: t for (kind, b, _), t in starts[0].items() if kind == "B"}
            aims = {b: sum(t < begins[b] for t in updates[by[s]]) for b in aims}
            aims = at[0]["B"] if by[s] == 0 else aims
        forward.append({b: aims[b] - seen["F"][b] for b in aims})
        backward.append({b: aims[b] - seen["B"][b] for b in aims})
    return forward, backward


def delays(order, system):
    """Per stage, d: the most updates that come there between F(s,b,i) and its backward, in the
    middle of the order."""
    stages = by_stage(order)
    # Updates of stage 0 before each micro-batch enters there.
    entered, updates = {}, 0
    for kind, b, i in stages[0]:
        updates += kind == "U"
        if kind == "F":
            entered[b, i] = updates
    last = 1 + max(b for _, b, _ in stages[0])
    found = []
    for ops in stages:
        latest, used, most = 0, {}, 0
        for kind, b, i in ops:
            if kind == "F":
                rules = {"latest": latest, "predicted": latest}
                rules |= {"entry": entered[b, i], "first": entered[b, 0]}
                used[b, i] = min(rules[SYSTEMS[system].forward], latest)
            elif kind == "B" and last // 3 <= b < 2 * last // 3:
                mine = min(v for (c, k), v in used.items() if c == b and i in (None, k))
                at = mine if SYSTEMS[system].backward == "forward" else latest
                most = max(most, at - mine)
            latest += kind == "U"
        found.append(most)
    return found


# Training ------------------------------------------------------------------------------------


@dataclass
class OracleStage:
    """One stage's layers, all its versions, and what it has in flight; the mean change of its
    weights."""

    layers: list[str]
    versions: list[dict[str, np.ndarray]]
    optimizer: object
    drift: dict[str, np.ndarray]
    used: dict[tuple[int, int], tuple[int, dict]] = field(default_factory=dict)
    saved: dict[tuple[int, int], list] = field(default_factory=dict)
    parts: dict[tuple[int, int], list] = field(default_factory=dict)
    grads: dict[str, np.ndarray] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)
    done: dict[int, int] = field(default_factory=dict)

    @property
    def latest(self):
        return len(self.versions) - 1

    def mean_gradients(self):
        """Over the mini-batches since the last update."""
        return {name: g / len(self.summed) for name, g in self.grads.items()}


@dataclass
class Tie:
    """A parameter that several stages of one device use: one parameter, with versions of its own.

    The stage whose backward comes last, the first one, updates it, with the sum of all the stages'
    gradients of the mini-batches that the update is of. Until then everyone has the version before.
    What the table says of a stage's weights and versions holds for it with its own.
    """

    stages: list[int]
    versions: list[dict[str, np.ndarray]]
    optimizer: object
    drift: dict[str, np.ndarray]
    used: dict[tuple[int, int, int], tuple[int, dict]] = field(default_factory=dict)
    grads: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def latest(self):
        return len(self.versions) - 1

    def mean_gradient(self, mini_batches):
        """Over these mini-batches."""
        return sum(self.grads[b] for b in mini_batches) / len(mini_batches)


class Oracle:
    """Runs an order on a chain of linear layers ("l…") and tanh ("t…") with a mean squared loss."""

    def __init__(
        self,
        system,
        stages,
        weights,
        optimizer,
        batches,
        *,
        decay="exponential",
        rate=1.0,
        schedule=lambda update: 1.0,
        clip=None,
        counts=np.ones_like,
        delays=None,
        rescheduling=0,
        discrepancy=0.135,
        stagewise=False,
        ties=None,
    ):
        """
        Args:
            system: a row of `SYSTEMS`, or its name.
            stages: per stage, names of its layers.
            weights: ``{"l0.weight": [out, in], "l0.bias": [out], …}``.
            optimizer: makes an optimizer for each stage.
            batches: per mini-batch, per micro-batch, (x, y); their sizes may differ.
            decay, rate: σ and λ, where backwards run on weights in between.
            schedule: share of the learning rate that a stage's update has, counted from 0.
            clip: the largest norm of an update's gradient. In systems that flush it is that of the
                whole model's. In others each stage has its part of it, so that the squares sum
                up: as its weights are to all weights.
            counts: how much each number of a target counts in the mean of its mini-batch, which
                is by the weight of all its micro-batches on all replicas.
            delays: per stage, d; none by default.
            rescheduling: T; the rate of update t is divided by d^(1 − min(t / T, 1)), d > 1.
            discrepancy: D; the mean change of the weights keeps D^(1 / d) of what it was. None:
                nothing is corrected.
            stagewise: momentum m is m + d·(0.99 − m) / S.
            ties: names of parameters that are the same as another, and that one's.
        """
        self.system = SYSTEMS.get(system, system)
        self.batches = batches
        self.significance = lambda d: SIGNIFICANCE[decay](d, rate)
        self.schedule, self.clip, self.counts = schedule, clip, counts
        # Norms of whole gradients, once all stages have theirs.
        self.drained = {}
        self.names = {name: (ties or {}).get(name, name) for name in weights}
        users = {}
        for s, layers in enumerate(stages):
            for name, first in self.names.items():
                if name.split(".")[0] in layers:
                    users.setdefault(first, set()).add(s)
        self.stages = [
            OracleStage(
                names,
                [{k: weights[k].copy() for k, used_by in users.items() if used_by == {s}}],
                optimizer(),
                {k: 0 * weights[k] for k, used_by in users.items() if used_by == {s}},
            )
            for s, names in enumerate(stages)
        ]
        self.delays = delays or [0 for _ in stages]
        self.rescheduling, self.discrepancy = rescheduling, discrepancy
        for stage, d in zip(self.stages, self.delays, strict=True):
            if stagewise:
                stage.optimizer.raise_momentum(d / len(stages))
        self.ties = {
            name: Tie(
                sorted(used_by),
                [{name: weights[name].copy()}],
                self.stages[min(used_by)].optimizer,
                {name: 0 * weights[name]},
            )
            for name, used_by in users.items()
            if len(used_by) > 1
        }
        self.rates = [stage.optimizer.lr for stage in self.stages]
        self.entry = {}
        self.activations = {}
        self.gradients = {}
        self.losses = [0.0 for _ in batches]
        # Per stage and operation: its text and the version it counts as using; the versions it
        # reads, and those that its forward's second run would read besides.
        self.log = [[] for _ in stages]
        self.reads = [[] for _ in stages]
        # Per backward: its version less its forward's, and how far its weights were from those of
        # the mini-batch's first forward: ‖W_B − W_F‖ / ‖W_F‖.
        self.differences = [[] for _ in stages]
        self.weight_distances = [[] for _ in stages]

    def run(self, text, first=0):
        """Run an order, a line of operations for each device; then it is drained.

        Args:
            first: what its mini-batch 0 is in the whole run.
        """
        todo = parse(text, first)
        if self.system.aim:
            self.k = {None: distances(todo, self.system.aim)}
            for name, tie in self.ties.items():
                by = [min(tie.stages) if s in tie.stages else s for s in range(len(self.stages))]
                self.k[name] = distances(todo, self.system.aim, by)
        while any(todo):
            moved = False
            for ops in todo:
                if ops and self._ready(*ops[0]):
                    self._execute(*ops.pop(0))
                    moved = True
            assert moved, "the order can't be executed"
        assert not self.activations
        assert not self.gradients
        assert not any(stage.saved or stage.parts or stage.grads for stage in self.stages)
        assert not any(tie.grads for tie in self.ties.values())
        return self

    def weights(self):
        """The latest weights of all stages."""
        holders = [*self.stages, *self.ties.values()]
        latest = {k: w for holder in holders for k, w in holder.versions[-1].items()}
        return {name: latest[first] for name, first in self.names.items()}

    def most_held(self, s, *, recompute=False):
        """The most versions a stage must hold at once, if it holds only what it will yet read.

        Args:
            recompute: the forward runs again just before its backward, on the same weights.
        """
        last_read = {}
        for k, (own, again) in enumerate(self.reads[s]):
            last_read.update(dict.fromkeys(own | again if recompute else own, k))
        latest, most = 0, 1
        for k, (text, version) in enumerate(self.log[s]):
            latest = version if "U" in text else latest
            most = max(most, 1 + sum(v < latest and last > k for v, last in last_read.items()))
        return most

    # Operations ------------------------------------------------------------------------------

    def _micros(self, b, i):
        return range(len(self.batches[b])) if i is None else [i]

    def _ready(self, s, kind, b, i):
        if kind == "F":
            return s == 0 or (s, b, i) in self.activations
        if kind == "B":
            return all((s, b, k) in self.gradients for k in self._micros(b, i))
        if kind == "U" and self.system.flushes:
            return b in self.drained or self._drained(b)
        return True

    def _drained(self, b):
        """All stages have all gradients of mini-batch b."""
        if all(stage.done.get(b, 0) == len(self.batches[b]) for stage in self.stages):
            self.drained[b] = _norm(
                g for s in range(len(self.stages)) for g in self._of_update(s).values()
            )
        return b in self.drained

    def _execute(self, s, kind, b, i):
        stage = self.stages[s]
        again = set()
        if kind == "F":
            version, weights, reads = self._forward_weights(s, b, i, None)
            stage.used[b, i] = version, weights
            for name, tie in self._tied(s):
                own, tied, _ = self._forward_weights(s, b, i, name)
                tie.used[s, b, i] = own, tied
                weights = weights | tied
            self._forward(s, b, i, weights)
        elif kind == "B":
            forward = {stage.used[b, k][0] for k in self._micros(b, i)}
            again = forward
            reads = set()
            versions = []
            for k in self._micros(b, i):
                version, weights, read = self._backward_weights(s, b, k, None)
                counted, before = weights, stage.used[b, k][1]
                for name, tie in self._tied(s):
                    _, tied, _ = self._backward_weights(s, b, k, name)
                    weights = weights | tied
                    if s == tie.stages[0]:
                        counted, before = counted | tied, before | tie.used[s, b, k][1]
                versions.append((version, _distance(counted, before)))
                reads |= read
                self._backward(s, b, k, weights)
                if not self.system.split:
                    self._weight_gradients(s, b, k)
            # Where micro-batches run on several versions, the oldest counts; of how far weights
            # are apart, the first micro-batch's.
            version = min(version for version, _ in versions)
            self.differences[s].append(version - min(forward))
            self.weight_distances[s].append(versions[0][1])
        elif kind == "W":
            version, reads = stage.latest, set()
            for k in self._micros(b, i):
                self._weight_gradients(s, b, k)
        else:
            self._update(s, b)
            version, reads = stage.latest, set()
        suffix = "" if i is None else f".{i}"
        self.log[s].append((f"{s}{kind}{b}{suffix}", version))
        self.reads[s].append((reads, again))

    # Which weights ---------------------------------------------------------------------------

    def _tied(self, s):
        """Names of parameters that the stage uses and others too, and these."""
        return [(name, tie) for name, tie in self.ties.items() if s in tie.stages]

    def _forward_weights(self, s, b, i, tied):
        """Version it counts as, weights, and the versions these are made of.

        Args:
            tied: of this parameter, which other stages use too; None: of the stage's own.
        """
        holder = self.stages[s] if tied is None else self.ties[tied]
        rule = self.system.forward
        if s == 0:
            self.entry[b, i] = self.stages[0].latest
        if rule == "predicted":
            k = self.k[tied][0][s][b]
            return holder.latest, self._predicted(holder, k), {holder.latest}
        version = {
            "latest": holder.latest,
            "entry": min(self.entry[b, i], holder.latest),
            "first": min(self.entry[b, 0], holder.latest),
        }[rule]
        return version, holder.versions[version], {version}

    def _backward_weights(self, s, b, i, tied):
        holder = self.stages[s] if tied is None else self.ties[tied]
        rule = self.system.backward
        version, weights = holder.used[b, i] if tied is None else holder.used[s, b, i]
        latest = holder.latest
        if rule == "forward":
            return version, weights, {version}
        if rule == "latest" or (rule == "corrected" and self.discrepancy is None):
            return latest, holder.versions[latest], {latest}
        if rule == "predicted":
            return latest, self._predicted(holder, self.k[tied][1][s][b]), {latest}
        if rule == "corrected":
            d = latest - version
            corrected = {k: w - d * holder.drift[k] for k, w in holder.versions[latest].items()}
            return latest, corrected, {latest}
        assert rule == "between"
        sigma = self.significance(latest - version)
        between = {k: w + sigma * (weights[k] - w) for k, w in holder.versions[latest].items()}
        return latest, between, {version, latest}

    def _predicted(self, holder, k):
        """k of the optimizer's steps on from the latest; before the first update, where it is."""
        latest, optimizer = holder.versions[holder.latest], holder.optimizer
        if holder.latest == 0:
            return latest
        if self.system.steps_by == "smoothed gradient":
            steps = {name: optimizer.smoothed_gradient(name) for name in latest}
        else:
            assert self.system.steps_by == "optimizer's step"
            steps = {name: optimizer.direction(name, w) for name, w in latest.items()}
        return {name: w - k * optimizer.lr * steps[name] for name, w in latest.items()}

    # What is computed ------------------------------------------------------------------------

    def _forward(self, s, b, i, weights):
        stage = self.stages[s]
        x = self.batches[b][i][0] if s == 0 else self.activations.pop((s, b, i))
        saved = []
        for name in stage.layers:
            if name.startswith("l"):
                saved.append(x)
                weight, bias = (weights[self.names[f"{name}.{k}"]] for k in ("weight", "bias"))
                x = x @ weight.T + bias
            else:
                x = np.tanh(x)
                saved.append(x)
        stage.saved[b, i] = saved
        if s < len(self.stages) - 1:
            self.activations[s + 1, b, i] = x
            return
        # The mean over all that counts in the whole mini-batch: a micro-batch counts by its share.
        target = self.batches[b][i][1]
        error, counts = x - target, self.counts(target)
        weight = sum(self.counts(y).sum() for _, y in self.batches[b])
        self.losses[b] += (counts * error**2).sum() / weight
        self.gradients[s, b, i] = 2 * counts * error / weight

    def _backward(self, s, b, i, weights):
        """Back through the layers; what weight gradients are made of is put aside."""
        stage = self.stages[s]
        g = self.gradients.pop((s, b, i))
        stage.parts[b, i] = []
        kept_by_layer = stage.saved.pop((b, i))
        for name, kept in zip(reversed(stage.layers), reversed(kept_by_layer), strict=True):
            if name.startswith("t"):
                g = g * (1 - kept**2)
            else:
                stage.parts[b, i].append((name, g, kept))
                g = g @ weights[self.names[f"{name}.weight"]]
        if s:
            self.gradients[s - 1, b, i] = g

    def _weight_gradients(self, s, b, i):
        stage = self.stages[s]
        stage.summed.add(b)
        stage.done[b] = stage.done.get(b, 0) + 1
        for name, g, kept in stage.parts.pop((b, i)):
            for key, part in ((f"{name}.weight", g.T @ kept), (f"{name}.bias", g.sum(0))):
                first = self.names[key]
                if first in self.ties:
                    grads = self.ties[first].grads
                    grads[b] = grads.get(b, 0) + part
                else:
                    stage.grads[first] = stage.grads.get(first, 0) + part

    def _of_update(self, s):
        """The gradients that a stage's update goes by: its own, and of ties that it updates."""
        stage = self.stages[s]
        found = stage.mean_gradients()
        for name, tie in self._tied(s):
            if s == tie.stages[0]:
                found[name] = tie.mean_gradient(sorted(stage.summed))
        return found

    def _update(self, s, b):
        stage = self.stages[s]
        mine = {name: tie for name, tie in self._tied(s) if s == tie.stages[0]}
        for tie in mine.values():
            assert all(self.stages[t].done[b] == len(self.batches[b]) for t in tie.stages)
        gradients, optimizer = self._of_update(s), stage.optimizer
        if self.clip is not None:
            most, norm = self.clip, self.drained.get(b)
            if not self.system.flushes:
                sizes = [sum(w.size for w in each.versions[0].values()) for each in self.stages]
                for tie in self.ties.values():
                    sizes[tie.stages[0]] += sum(w.size for w in tie.versions[0].values())
                most, norm = most * np.sqrt(sizes[s] / sum(sizes)), _norm(gradients.values())
            share = min(1.0, most / (norm + 1e-6))
            gradients = {name: share * g for name, g in gradients.items()}
        step = optimizer.nesterov_step if self.system.nesterov else optimizer.step
        optimizer.lr = self._rate(s)
        for holder in (stage, *mine.values()):
            latest = holder.versions[-1]
            after = {name: step(name, w, gradients[name]) for name, w in latest.items()}
            holder.versions.append(after)
            if self.delays[s] and self.discrepancy is not None:
                kept = self.discrepancy ** (1 / self.delays[s])
                for name, w in after.items():
                    change = w - latest[name]
                    holder.drift[name] = kept * holder.drift[name] + (1 - kept) * change
        # The next update's, which predictions go by.
        optimizer.lr = self._rate(s)
        for tie in mine.values():
            for done in stage.summed:
                del tie.grads[done]
        stage.grads, stage.summed = {}, set()

    def _rate(self, s):
        """Of the stage's next update."""
        t, d = self.stages[s].latest, self.delays[s]
        rate = self.rates[s] * self.schedule(t)
        if self.rescheduling and d > 1:
            rate /= d ** (1 - min(t / self.rescheduling, 1))
        return rate


def _norm(arrays):
    return np.sqrt(sum((a**2).sum() for a in arrays))


def _distance(weights, others):
    if not weights:
        return 0.0
    a, b = (np.concatenate([w.ravel() for w in each.values()]) for each in (weights, others))
    return np.linalg.norm(a - b) / np.linalg.norm(b)
