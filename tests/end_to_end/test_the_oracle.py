"""The oracle itself, against closed forms and torch; only its orders come from the package.

Where a stage's order is 1F1B with S − s in flight, mini-batch b runs forward on the version
max(0, b − D) and backward while the version is b, D = S − 1 − s stages behind. So training can be
written as a recurrence over b without any order: `Recurrence`.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.by_hand.unit_pipelines import unit_pipeline
from helpers.oracle import SGD, SYSTEMS, Adam, Oracle, distances, parse, unit_clock
from helpers.output.schedules import schedule_text
from mlp_task import WIDTHS, MLPTask
from timeprest.planner.schedules.schedules import make_schedule

STEPS = 9
LAYERS = [["l0", "t0"], ["l1", "t1"], ["l2", "t2"], ["l3"]]

OPTIMIZERS = {
    "sgd": (SGD, torch.optim.SGD, torch.optim.SGD, {}),
    "sgd with decay": (SGD, torch.optim.SGD, torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (SGD, torch.optim.SGD, torch.optim.SGD, {"momentum": 0.9}),
    "momentum with decay": (
        SGD,
        torch.optim.SGD,
        torch.optim.SGD,
        {"momentum": 0.8, "weight_decay": 0.1},
    ),
    "adam": (Adam, torch.optim.Adam, torch.optim.NAdam, {}),
    "adam with decay": (Adam, torch.optim.Adam, torch.optim.NAdam, {"weight_decay": 0.1}),
    "adamw": (Adam, torch.optim.AdamW, torch.optim.NAdam, {"weight_decay": 0.1}),
}
"""The oracle's, torch's, torch's with Nesterov's look ahead, what they are given."""

WHOLE_MINI_BATCHES = (
    "pipedream",
    "pipedream-unstashed",
    "pipedream-nesterov",
    "pipedream-vertical-sync",
    "spectrain",
    "pipeoptim",
)


def by_hand(name, lr=0.05):
    """Makes the oracle's optimizer."""
    make, _, _, given = OPTIMIZERS[name]
    more = {"decoupled": True} if name == "adamw" else {}
    return lambda: make(lr=lr, **given, **more)


def by_torch(name, parameters, lr=0.05, *, nesterov=False):
    _, plain, ahead, given = OPTIMIZERS[name]
    if not nesterov:
        return plain(parameters, lr=lr, **given)
    if plain is torch.optim.SGD:
        # The gradient discounted by 1 − γ is a learning rate discounted by it.
        gamma = given.get("momentum", 0.0)
        return plain(parameters, **{**given, "lr": lr * (1 - gamma), "nesterov": gamma > 0})
    return ahead(parameters, lr=lr, decoupled_weight_decay=name == "adamw", **given)


def first_weights():
    torch.manual_seed(0)
    return {name: w.numpy().copy() for name, w in MLPTask().model().state_dict().items()}


def split(layers, stages):
    """Four pieces in so many stages."""
    borders = [round(k * len(layers) / stages) for k in range(stages + 1)]
    return [[*itertools.chain(*layers[a:b])] for a, b in itertools.pairwise(borders)]


def make_batches(sizes, steps=STEPS, widths=WIDTHS):
    """Micro-batches of these sizes."""
    draw = np.random.default_rng(3).standard_normal
    return [[(draw((k, widths[0])), draw((k, widths[-1]))) for k in sizes] for _ in range(steps)]


def text_of(system, stages, n, steps=STEPS):
    """The package's order with equal stages and S − s in flight."""
    like = "pipedream" if system in WHOLE_MINI_BATCHES else system
    return schedule_text(make_schedule(unit_pipeline(like, stages, n), steps))


def without_updates(text, every, steps):
    """Updates after each so many-th mini-batch, and after the last."""
    kept = {b for b in range(steps) if (b + 1) % every == 0 or b == steps - 1}
    lines = text.splitlines()
    return "\n".join(
        " ".join(w for w in line.split() if "U" not in w or int(w.split("U")[1]) in kept)
        for line in lines
    )


ZERO_BUBBLE = """\
0F0.0 0F0.1 0B0.0 0W0.0 0F0.2 0B0.1 0W0.1 0B0.2 0W0.2 0U0 0F1.0 0F1.1 0B1.0 0W1.0 0F1.2 0B1.1 \
0W1.1 0B1.2 0W1.2 0U1
1F0.0 1B0.0 1F0.1 1B0.1 1W0.0 1F0.2 1B0.2 1W0.1 1W0.2 1U0 1F1.0 1B1.0 1F1.1 1B1.1 1W1.0 1F1.2 \
1B1.2 1W1.1 1W1.2 1U1"""


def tensors(batch):
    return tuple(torch.from_numpy(np.concatenate(part)) for part in zip(*batch, strict=True))


def gradients_of(weights, batch):
    """Loss and gradients at these weights, by autograd."""
    model = MLPTask().model()
    model.load_state_dict({name: torch.from_numpy(w.copy()) for name, w in weights.items()})
    x, y = tensors(batch)
    loss = MLPTask().loss(model(x), y)
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}


def falling(update):
    """A schedule of learning rates."""
    return 0.8**update


def train_plainly(batches, optimizer, every=1, *, nesterov=False, clip=None, schedule=None):
    """Losses, and weights at the end, of a loop with torch's own optimizer."""
    model = MLPTask().model()
    model.load_state_dict({name: torch.from_numpy(w) for name, w in first_weights().items()})
    stepper = by_torch(optimizer, model.parameters(), nesterov=nesterov)
    if schedule is not None:
        scheduler = torch.optim.lr_scheduler.LambdaLR(stepper, schedule)
    losses = []
    for k in range(0, len(batches), every):
        group = batches[k : k + every]
        stepper.zero_grad()
        for batch in group:
            x, y = tensors(batch)
            loss = MLPTask().loss(model(x), y)
            (loss / len(group)).backward()
            losses.append(loss.item())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepper.step()
        if schedule is not None:
            scheduler.step()
    return losses, {name: w.numpy() for name, w in model.state_dict().items()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, w in wanted.items():
        np.testing.assert_allclose(found[name], w, rtol=0, atol=1e-12, err_msg=name)


# Plain training ------------------------------------------------------------------------------


@pytest.mark.choice(45)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_with_one_stage_every_system_is_plain_training(system, optimizer):
    """With torch's optimizers: forward, backward, and every update rule."""
    sizes = [4] if system in WHOLE_MINI_BATCHES else [1, 3, 2]
    batches = make_batches(sizes)
    oracle = Oracle(system, split(LAYERS, 1), first_weights(), by_hand(optimizer), batches)
    oracle.run(text_of(system, 1, len(sizes)))
    losses, weights = train_plainly(batches, optimizer, nesterov=SYSTEMS[system].nesterov)
    np.testing.assert_allclose(oracle.losses, losses, rtol=0, atol=1e-12)
    assert_same(oracle.weights(), weights)
    assert oracle.most_held(0) == 1
    assert set(oracle.differences[0]) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[6], [2, 2, 2], [3, 2, 1], [3, 3, 0]])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("system", ["gpipe", "pipedream-flush", "zb-h1"])
def test_flush_systems_are_plain_training(system, stages, sizes):
    """However a mini-batch is cut into micro-batches: each counts by its share, be it nothing."""
    batches = make_batches(sizes)
    oracle = Oracle(system, split(LAYERS, stages), first_weights(), by_hand("adam"), batches)
    oracle.run(text_of(system, stages, len(sizes)))
    losses, weights = train_plainly(batches, "adam")
    np.testing.assert_allclose(oracle.losses, losses, rtol=0, atol=1e-12)
    assert_same(oracle.weights(), weights)
    assert [oracle.most_held(s) for s in range(stages)] == [1] * stages


def test_weight_gradients_may_come_later():
    batches = make_batches([2, 2, 2], steps=2)
    oracle = Oracle("zb-h1", split(LAYERS, 2), first_weights(), by_hand("momentum"), batches)
    oracle.run(ZERO_BUBBLE)
    losses, weights = train_plainly(batches, "momentum")
    np.testing.assert_allclose(oracle.losses, losses, rtol=0, atol=1e-12)
    assert_same(oracle.weights(), weights)
    assert ("1W0.1", 0) in oracle.log[1]


def test_weight_gradients_left_out_are_noticed():
    batches = make_batches([2, 2, 2], steps=2)
    oracle = Oracle("zb-h1", split(LAYERS, 2), first_weights(), by_hand("momentum"), batches)
    with pytest.raises(AssertionError):
        oracle.run(ZERO_BUBBLE.replace(" 1W1.2", ""))


@pytest.mark.parametrize("every", [2, 4])
@pytest.mark.parametrize(("system", "stages"), [("pipedream", 1), ("timeprest", 1), ("gpipe", 3)])
def test_an_update_takes_the_mean_gradient_since_the_last(system, stages, every):
    """Nine mini-batches: the last group is a short one."""
    sizes = [4] if system == "pipedream" else [2, 2]
    batches = make_batches(sizes)
    oracle = Oracle(system, split(LAYERS, stages), first_weights(), by_hand("adam"), batches)
    oracle.run(without_updates(text_of(system, stages, len(sizes)), every, STEPS))
    losses, weights = train_plainly(batches, "adam", every)
    np.testing.assert_allclose(oracle.losses, losses, rtol=0, atol=1e-12)
    assert_same(oracle.weights(), weights)
    assert all(stage.latest == -(-STEPS // every) for stage in oracle.stages)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("system", "stages"), [("gpipe", 1), ("gpipe", 3), ("timeprest", 1)])
def test_clipping_and_schedules(system, stages, every):
    """As torch clips the whole model's gradient; a stage that is all of it does the same."""
    batches = make_batches([2, 2])
    oracle = Oracle(
        system,
        split(LAYERS, stages),
        first_weights(),
        by_hand("adam"),
        batches,
        schedule=falling,
        clip=0.5,
    )
    oracle.run(without_updates(text_of(system, stages, 2), every, STEPS))
    losses, weights = train_plainly(batches, "adam", every, clip=0.5, schedule=falling)
    np.testing.assert_allclose(oracle.losses, losses, rtol=0, atol=1e-12)
    assert_same(oracle.weights(), weights)
    assert (
        np.abs(weights["l0.weight"] - train_plainly(batches, "adam")[1]["l0.weight"]).max() > 0.01
    )


def test_stages_share_the_largest_norm():
    """Where nothing is flushed, what moves the weights is never longer than η times the norm."""
    batches = make_batches([4])
    oracle = Oracle(
        "pipedream", split(LAYERS, 4), first_weights(), by_hand("sgd"), batches, clip=0.1
    )
    oracle.run(text_of("pipedream", 4, 1))
    for v in range(STEPS):
        steps = [
            s.versions[v][k] - s.versions[v + 1][k] for s in oracle.stages for k in s.versions[v]
        ]
        length = np.sqrt(sum((step**2).sum() for step in steps))
        assert 0.01 * 0.05 < length <= 0.1 * 0.05


def test_one_order_after_another():
    """Two epochs: versions and optimizers go on, mini-batches are counted on."""
    batches = make_batches([2, 2])
    oracle = Oracle("timeprest", split(LAYERS, 3), first_weights(), by_hand("adam"), batches)
    oracle.run(text_of("timeprest", 3, 2, 5)).run(text_of("timeprest", 3, 2, 4), first=5)
    assert oracle.log[0][-1] == ("0U8", 9)
    whole = Oracle("timeprest", split(LAYERS, 3), first_weights(), by_hand("adam"), batches)
    whole.run(text_of("timeprest", 3, 2))
    difference = max(np.abs(oracle.weights()[k] - w).max() for k, w in whole.weights().items())
    assert difference > 1e-6


# Closed forms --------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", range(1, 10))
def test_spectrain_distances(stages):
    """⌊s/2⌋ + S − s − 1 and ⌊s/2⌋; less only where the run begins and ends."""
    steps = 3 * stages + 4
    order = parse(text_of("spectrain", stages, 1, steps))
    forward, backward = distances(order, "B(0,b)")
    for s in range(stages):
        behind = stages - 1 - s
        for b in range(steps):
            aim = min(b + s // 2, steps)
            assert forward[s][b] == aim - max(0, b - behind)
            assert backward[s][b] == aim - b
        b = steps - stages
        assert (forward[s][b], backward[s][b]) == (s // 2 + behind, s // 2)


@pytest.mark.parametrize("stages", range(1, 10))
def test_distances_to_the_own_backward(stages):
    forward, backward = distances(parse(text_of("pipeoptim", stages, 1, 3 * stages)), "B(s,b)")
    for s in range(stages):
        assert forward[s] == {b: min(b, stages - 1 - s) for b in range(3 * stages)}
        assert set(backward[s].values()) == {0}


def test_unit_clock():
    """S = 2: stage 0 waits for the gradient, stage 1 for the activation."""
    order = parse("0F0.0 0F1.0 0B0 0U0 0B1 0U1\n1F0.0 1B0 1U0 1F1.0 1B1 1U1")
    starts = unit_clock(order)
    assert [starts[0][op[1:]] for op in order[0]] == [0, 1, 3, 4, 5, 6]
    assert [starts[1][op[1:]] for op in order[1]] == [1, 2, 3, 3, 4, 5]


def test_unit_clock_of_devices_with_several_stages():
    """Stages 0 and 2 take turns on one device."""
    order = parse("0F0.0 0F1.0 2F0.0 2B0 2U0 0B0 0U0\n1F0.0 1B0 1U0")
    starts = unit_clock(order)
    assert list(starts[0].values()) == [0, 1, 5, 6]
    assert list(starts[1].values()) == [1, 4, 5]
    assert list(starts[2].values()) == [2, 3, 4]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_versions_held(stages):
    """S − s with stashes, S with vertical sync, s + 1 with that and no stash, one where nothing is
    kept; see the table."""
    batches = make_batches([2], steps=12)

    def held(system, n=1, **more):
        oracle = Oracle(
            system,
            split(LAYERS, stages),
            first_weights(),
            by_hand("sgd"),
            [batch * n for batch in batches],
        )
        oracle.run(text_of(system, stages, n, 12))
        return [oracle.most_held(s, **more) for s in range(stages)], oracle.differences

    down = [stages - s for s in range(stages)]
    assert held("pipedream")[0] == held("pipedream-nesterov")[0] == down
    assert held("pipedream-vertical-sync")[0] == [stages] * stages
    assert held("pipedream-2bw", 4)[0] == [min(stages, 2)] * stages
    assert held("spectrain")[0] == held("pipeoptim")[0] == [1] * stages
    assert held("v-timeprest", 4)[0] == held("pipemare", 2)[0] == [1] * stages
    # To run a forward again, its weights must be kept as if they were stashed.
    assert held("v-timeprest", recompute=True)[0] == down
    assert held("timeprest", recompute=True)[0] == [stages] * stages
    assert held("pipedream-unstashed")[0] == held("timeprest")[0] == down[::-1]
    assert held("timeprest-stashed")[0] == [stages] * stages
    versions, differences = held("i-timeprest", 2)
    assert versions == [1 + max(seen) for seen in differences]
    assert held("gpipe", 2, recompute=True)[0] == [1] * stages


class Recurrence:
    """1F1B of whole mini-batches, one linear layer without bias for each stage, by recurrence."""

    def __init__(self, stages, optimizer, batches, weights):
        self.stages, self.batches = stages, batches
        self.optimizers = [optimizer() for _ in range(stages)]
        self.versions = [[weights[f"l{s}.weight"]] for s in range(stages)]

    def run(self, forward, backward, *, nesterov=False):
        """forward(self, s, b, v), backward(self, s, b, v, used) → weights; v is b − D in a forward
        and b in a backward."""
        for b, ((x, y),) in enumerate(self.batches):
            inputs, used = [], []
            for s in range(self.stages):
                inputs.append(x)
                used.append(forward(self, s, b, max(0, b - (self.stages - 1 - s))))
                x = x @ used[-1].T
            g = 2 * (x - y) / y.size
            for s in reversed(range(self.stages)):
                gradient = g.T @ inputs[s]
                g = g @ backward(self, s, b, b, used[s])
                optimizer = self.optimizers[s]
                step = optimizer.nesterov_step if nesterov else optimizer.step
                self.versions[s].append(step("w", self.versions[s][b], gradient))
        return self

    def velocity(self, s, v):
        """Momentum SGD's buffer after v updates: what the last of them moved the weights by."""
        if v == 0:
            return np.zeros_like(self.versions[s][0])
        return (self.versions[s][v - 1] - self.versions[s][v]) / 0.05


def latest(run, s, b, v, used=None):
    return run.versions[s][v]


def stashed(run, s, b, v, used):
    return used


def entered(run, s, b, v):
    return run.versions[s][max(0, b - run.stages + 1)]


def to_the_round_trips_end(run, s, b, v, used=None):
    """SpecTrain's own formula. Predictions are made with the momentum at version v."""
    k = min(b + s // 2, len(run.batches)) - v
    return run.versions[s][v] - k * 0.05 * run.velocity(s, v)


def to_the_own_backward(run, s, b, v):
    return run.versions[s][v] - (b - v) * 0.05 * run.velocity(s, v)


def corrected(run, s, b, v, used):
    """W_v − d·δ_v with δ_v = Σ (1 − γ)·γ^(v − j)·(W_j − W_(j−1)), γ = 0.135^(1 / (S − 1 − s))."""
    behind = run.stages - 1 - s
    d = min(b, behind)
    if not d:
        return run.versions[s][v]
    gamma = 0.135 ** (1 / behind)
    changes = np.diff(run.versions[s][: v + 1], axis=0)
    shares = (1 - gamma) * gamma ** np.arange(v - 1, -1, -1)
    return run.versions[s][v] - d * np.tensordot(shares, changes, 1)


def in_between(run, s, b, v, used):
    d = min(b, run.stages - 1)
    return run.versions[s][v] + np.exp(-0.5 * d) * (used - run.versions[s][v])


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("system", "forward", "backward"),
    [
        ("pipedream", latest, stashed),
        ("pipedream-nesterov", latest, stashed),
        ("pipedream-vertical-sync", entered, stashed),
        ("spectrain", to_the_round_trips_end, to_the_round_trips_end),
        ("pipeoptim", to_the_own_backward, latest),
        ("v-timeprest", latest, latest),
        ("pipemare", latest, corrected),
        ("timeprest", entered, latest),
        ("pipedream-unstashed", entered, latest),
        ("timeprest-stashed", entered, stashed),
        ("i-timeprest", entered, in_between),
    ],
)
def test_one_forward_one_backward_is_a_recurrence(system, forward, backward, stages):
    widths = [3] * (stages + 1)
    batches = make_batches([4], widths=widths)
    draw = np.random.default_rng(5).standard_normal
    weights = {f"l{s}.weight": 0.7 * draw((3, 3)) for s in range(stages)}
    wanted = Recurrence(stages, by_hand("momentum"), batches, weights)
    wanted.run(forward, backward, nesterov=system == "pipedream-nesterov")
    biases = {f"l{s}.bias": np.zeros(3) for s in range(stages)}
    oracle = NoBias(
        system,
        [[f"l{s}"] for s in range(stages)],
        {**weights, **biases},
        by_hand("momentum"),
        batches,
        rate=0.5,
        delays=[stages - 1 - s for s in range(stages)],
    )
    oracle.run(text_of("pipedream", stages, 1))
    for s, stage in enumerate(oracle.stages):
        found = [w[f"l{s}.weight"] for w in stage.versions]
        np.testing.assert_allclose(found, wanted.versions[s], rtol=0, atol=1e-12)


class NoBias(Oracle):
    """Biases stay at zero."""

    def _update(self, s, b):
        grads = self.stages[s].grads
        grads.update({name: np.zeros_like(g) for name, g in grads.items() if "bias" in name})
        super()._update(s, b)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_2bw_is_one_version_late_everywhere(stages):
    """W(t+1) = W(t) − η·g(W(t−1)), by autograd."""
    batches = make_batches([2, 1, 2, 3])
    oracle = Oracle(
        "pipedream-2bw", split(LAYERS, stages), first_weights(), by_hand("sgd"), batches
    )
    oracle.run(text_of("pipedream-2bw", stages, 4))
    versions = [first_weights()]
    for t, batch in enumerate(batches):
        loss, gradients = gradients_of(versions[max(0, t - 1)], batch)
        versions.append({k: w - 0.05 * gradients[k] for k, w in versions[t].items()})
        assert oracle.losses[t] == pytest.approx(loss, abs=1e-12)
    for v, wanted in enumerate(versions):
        found = {k: w for stage in oracle.stages for k, w in stage.versions[v].items()}
        assert_same(found, wanted)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("decay", ["exponential", "inverse", "linear"])
def test_i_timeprest_between_its_ends(decay, n):
    """Much decay: the latest weights, as timeprest. None: the forward's own weights."""
    batches = make_batches([2] * n)

    def train(system, **more):
        oracle = Oracle(
            system, split(LAYERS, 4), first_weights(), by_hand("momentum"), batches, **more
        )
        return oracle.run(text_of("timeprest", 4, n)).weights()

    assert_same(train("i-timeprest", decay=decay, rate=1e15), train("timeprest"))
    assert_same(train("i-timeprest", decay=decay, rate=0.0), train("timeprest-stashed"))


def test_significance():
    """σ is 1 at no difference, falls, and never leaves 0 to 1; three forms that differ."""
    oracles = [
        Oracle("i-timeprest", [[]], {}, SGD, [[]], decay=decay, rate=0.4)
        for decay in ("exponential", "inverse", "linear")
    ]
    values = [[o.significance(d) for d in range(5)] for o in oracles]
    np.testing.assert_allclose(values[0], np.exp([0, -0.4, -0.8, -1.2, -1.6]))
    np.testing.assert_allclose(values[1], [1, 1 / 1.4, 1 / 1.8, 1 / 2.2, 1 / 2.6])
    np.testing.assert_allclose(values[2], [1, 0.6, 0.2, 0, 0], atol=1e-15)


def test_entered_and_latest_micro_batches_by_hand():
    """An update lands between the micro-batches of mini-batch 1 on stage 0."""
    text = "0F0.0 0F0.1 0F1.0 0B0 0U0 0F1.1 0B1 0U1\n1F0.0 1F0.1 1B0 1U0 1F1.0 1F1.1 1B1 1U1"
    batches = make_batches([2, 2], steps=2)
    used = {}
    for system in ("timeprest", "timeprest-stashed", "v-timeprest", "i-timeprest"):
        oracle = Oracle(system, split(LAYERS, 2), first_weights(), by_hand("sgd"), batches)
        oracle.run(text)
        versions = [dict(log) for log in oracle.log]
        used[system] = [
            (log[f"{s}F1.0"], log[f"{s}F1.1"], log[f"{s}B1"], oracle.most_held(s))
            for s, log in enumerate(versions)
        ]
        assert oracle.differences[0] == [0, 0 if system == "timeprest-stashed" else 1]
        assert oracle.weight_distances[0][0] == 0.0
        assert (oracle.weight_distances[0][1] > 0.0) == (system != "timeprest-stashed")
    # Stage 1 has mini-batch 0's update before both; 1F1.0 entered without it.
    assert used == {
        "timeprest": [(0, 1, 1, 1), (0, 1, 1, 2)],
        "timeprest-stashed": [(0, 1, 0, 2), (0, 1, 0, 2)],
        "v-timeprest": [(0, 1, 1, 1), (1, 1, 1, 1)],
        "i-timeprest": [(0, 1, 1, 2), (0, 1, 1, 2)],
    }


# Optimizers: what predictions are made of ----------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_prediction_of_one_step_is_what_the_optimizer_would_do_again(optimizer):
    """`direction` is the last step over the learning rate, where the weights have not moved."""
    draw = np.random.default_rng(2).standard_normal
    w, stepper = draw((3, 2)), by_hand(optimizer)()
    for _ in range(3):
        moved = stepper.step("w", w, draw((3, 2)))
    np.testing.assert_allclose(
        w - stepper.lr * stepper.direction("w", w), moved, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(
    ("optimizer", "key"),
    [
        ("momentum", "momentum_buffer"),
        ("momentum with decay", "momentum_buffer"),
        ("adam", "exp_avg"),
        ("adam with decay", "exp_avg"),
        ("adamw", "exp_avg"),
    ],
)
def test_the_smoothed_gradient_is_in_torchs_state(optimizer, key):
    draw = np.random.default_rng(2).standard_normal
    w = draw((3, 2))
    parameter, hand = torch.nn.Parameter(torch.from_numpy(w.copy())), by_hand(optimizer)()
    stepper = by_torch(optimizer, [parameter])
    for _ in range(3):
        g = draw((3, 2))
        parameter.grad = torch.from_numpy(g)
        stepper.step()
        w = hand.step("w", w, g)
    np.testing.assert_allclose(hand.smoothed_gradient("w"), stepper.state[parameter][key])
