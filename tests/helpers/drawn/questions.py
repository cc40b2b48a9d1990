"""Drawn planning questions of every kind, by seed, and all plans that answer them.

Profiles with skips, with parts that nothing connects, cuts that no gradient crosses, views, tied
layers and fixed costs; clusters with machines, slow links and links that keep devices busy; memory
that some plan just fits. Plans are listed without the search's help: cuts by the profile's edges,
devices in the cluster's order, all N, limits and ways to run a stage.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, islice, pairwise, product
from typing import Any

import msgspec
from timeprest.planner.cluster.catalogue import with_speeds
from timeprest.planner.cluster.cluster import ANY, Cluster, Device, LinkBetween
from timeprest.planner.cluster.links import AllReduce, Network
from timeprest.planner.costs.recomputation import Selection, of_stage
from timeprest.planner.costs.stage_costs import least_of
from timeprest.planner.evaluate import Evaluation, evaluate
from timeprest.planner.plan import Plan, PlanStage
from timeprest.planner.question import Question
from timeprest.planner.schedules.prediction import prediction_distances
from timeprest.planner.schedules.schedules import StalenessBounds, limit_ranges, make_schedule
from timeprest.planner.search.choices import Freedom
from timeprest.planner.search.relaxed.relaxation import Relaxation
from timeprest.planner.search.solve import solve
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import ScheduleError
from timeprest.profiles.profile import (
    Edge,
    KindTimes,
    Layer,
    Measurement,
    OperationCost,
    OptimizerCost,
    Profile,
    SharedParameters,
    Storage,
    check_profile,
)

from .pipelines import ALL


@dataclass(frozen=True)
class Drawn:
    """A question, what may be chosen, and all plans.

    Attributes:
        asked: micro-batches, or None for any.
        stages: how many; None: any number. Plans have no others.
        pins: (layer's name, the stage it is on in all plans).
        plans: (N, evaluation), those that don't fit their devices too.
    """

    question: Question
    freedom: Freedom
    asked: int | None
    plans: list[tuple[int, Evaluation]]
    stages: int | None = None
    pins: tuple[tuple[str, int], ...] = ()

    @property
    def fitting(self) -> list[Evaluation]:
        """Plans that the devices have memory for."""
        cluster = self.question.cluster
        return [found for _, found in self.plans if not found.over_limit(cluster)]

    @property
    def best_s(self) -> float | None:
        """The shortest period there is; None where nothing fits."""
        return min((found.prediction.period_s for found in self.fitting), default=None)


def drawn(
    seed: int,
    most_plans: int = 600,
    systems: Sequence[str] = tuple(ALL),
    *,
    kinds: bool = False,
    linked: bool = False,
) -> Drawn | None:
    """The question with this number, of one of these systems; None where it has more plans than
    `most_plans`, or none, as the profile has no such micro-batches.

    Args:
        kinds: with devices of kinds that the profile has seconds of.
        linked: its devices have links by pairs and by size of messages.
    """
    rng = random.Random(seed)
    variant = VARIANTS[rng.choice(systems)]
    profile = drawn_profile(rng)
    tied = rng.choice(["together", "split"]) if variant.flushes else "together"
    every = rng.choice([1, 1, 1, 2])
    factor = rng.choice([0.0, 1.0, 2.0])
    cluster = drawn_cluster(rng)
    if kinds:
        profile, cluster = of_kinds(random.Random(-1 - seed), profile, cluster)
    if linked:
        cluster = with_links(random.Random(-seed), cluster)
    batch = profile.batch_size
    question = Question(profile, cluster, variant.name, batch, factor, every, tied)
    ways = ["off", "off", "on", "auto", "selective"]
    again = "off" if variant.recompute_refusal else rng.choice(ways)
    freedom = Freedom(rng.random() < 0.35, again)
    asked = None
    if not variant.whole_mini_batches and rng.random() < 0.6:
        asked = rng.choice([n for n in range(1, batch + 1) if -(-batch // n) <= batch])
    # One more than may be says that there are too many, before any of them is evaluated.
    every_plan = list(islice(all_plans(question, freedom, asked), most_plans + 1))
    if not 0 < len(every_plan) <= most_plans:
        return None
    plans = [(n, evaluate(question, stages, n)) for n, stages in every_plan]
    cluster = with_memory(rng, cluster, [found for _, found in plans])
    question = replace(question, cluster=cluster)
    plans = [(n, plan) for n, plan in plans if looked_at(question, again, plan)]
    found = Drawn(question, freedom, asked, plans)
    return narrowed(rng, found) if rng.random() < 0.25 else found


def solved(question: Question, **asked: Any) -> Plan:
    """A question's plan, however long it takes. Raises InfeasibleError."""
    return solve(
        question.profile,
        question.cluster,
        question.variant,
        mini_batch=question.mini_batch,
        optimizer_state_factor=question.optimizer_state_factor,
        update_every=question.update_every,
        tied=question.tied,
        time_limit_s=None,
        **asked,
    )


def narrowed(rng: random.Random, found: Drawn) -> Drawn:
    """The same with a number of stages, or layers on stages, as some plan has them."""
    _, plan = rng.choice(found.plans)
    stages, pins = None, []
    if rng.random() < 0.5:
        stages = len(plan.stages)
    if stages is None or rng.random() < 0.5:
        s = rng.randrange(len(plan.stages))
        pins.append((rng.choice(plan.stages[s].nodes), s))
    plans = [
        (n, other)
        for n, other in found.plans
        if stages in (None, len(other.stages))
        and all(s < len(other.stages) and name in other.stages[s].nodes for name, s in pins)
    ]
    return replace(found, plans=plans, stages=stages, pins=tuple(pins))


# Profiles ------------------------------------------------------------------------------------


def drawn_profile(rng: random.Random) -> Profile:
    """A small graph of layers whose times aren't proportional to samples."""
    count = rng.choice([2, 3, 3, 4, 4, 5, 6])
    batch = rng.choice([4, 6, 8])
    sizes = tuple(sorted({1, 2, batch} if rng.random() < 0.7 else {2, 3, batch}))
    loose, dead = rng.choice([0.0, 0.0, 0.0, 0.3]), rng.choice([0.0, 0.0, 0.3, 0.7])
    edges, storages = [], {}

    def tensor(k: int, name: str) -> None:
        per_sample = rng.choice([0, 1_000, 20_000, 300_000]) * rng.uniform(0.2, 1.2)
        if rng.random() < 0.5:
            per_sample = float(round(per_sample))
        fixed = rng.choice([0, 0, 0, 9_000])
        # A view takes less than the memory behind it.
        more = rng.choice([1.0, 1.0, 2.0])
        storages[f"s{name}"] = Storage(
            name=f"s{name}", bytes_per_sample=per_sample * more, fixed_bytes=fixed
        )
        sent[k].append((f"t{name}", f"s{name}", per_sample, fixed, rng.random() >= dead))

    sent: dict[int, list[tuple]] = {k: [] for k in range(count)}
    used, makes = set(), {}
    for k in range(count):
        for name in [str(k), f"{k}b"][: 1 + (rng.random() < 0.15)]:
            tensor(k, name)
    for k in range(1, count):
        producers = set()
        if rng.random() >= loose:
            producers.add(k - 1 if rng.random() < 0.7 else rng.randrange(k))
            if rng.random() < 0.3:
                producers.add(rng.randrange(k))
        for p in sorted(producers):
            for name, storage, per_sample, fixed, grad in (
                sent[p] if rng.random() < 0.5 else sent[p][:1]
            ):
                edges.append((p, f"l{k}", name, storage, per_sample, fixed, grad))
                used.add(p)
                makes.setdefault(k, set()).add(storage)
    for k in range(count):
        if k == count - 1 or (k not in used and rng.random() < 0.5):
            name, storage, per_sample, fixed, grad = sent[k][0]
            edges.append((k, "output", name, storage, per_sample, fixed, grad))
    layers = [_layer(rng, k, sizes, storages, makes.get(k, set())) for k in range(count)]
    tied, shared = (), ()
    if rng.random() < 0.25:
        group = tuple(f"l{k}" for k in sorted(rng.sample(range(count), 2)))
        tied = (group,)
        if rng.random() < 0.6:
            most = next(la for la in layers if la.name == group[0]).parameter_bytes
            shared = (SharedParameters(layers=group, parameter_bytes=most // 2),)
    loss = _measurements(rng, sizes, 0.2, 0) if rng.random() < 0.5 else ()
    operation = None
    if rng.random() < 0.2:
        costs = ("keep_s_per_byte", "mix_s_per_byte", "predict_s_per_byte", "update_s_per_byte")
        operation = OperationCost(
            forward_s=rng.choice([0.0, 2e-4]),
            mini_batch_s=rng.choice([0.0, 3e-4]),
            **{name: rng.choice([0.0, 1e-9]) for name in costs},
        )
    return check_profile(
        Profile(
            target="drawn",
            fingerprint="0" * 32,
            device="cpu",
            threads=1,
            dtype="float32",
            torch_version="",
            batch_size=batch,
            micro_batch_sizes=sizes,
            inputs=(),
            layers=tuple(layers),
            edges=tuple(
                Edge(
                    producer=f"l{p}",
                    consumer=consumer,
                    tensor=name,
                    storage=storage,
                    bytes_per_sample=per_sample,
                    fixed_bytes=fixed,
                    needs_grad=grad,
                )
                for p, consumer, name, storage, per_sample, fixed, grad in edges
            ),
            storages=tuple(storages.values()),
            tied=tied,
            shared=shared,
            loss=loss,
            optimizer=OptimizerCost(
                name="Adam",
                state_bytes_per_parameter_byte=2.0,
                update_fixed_s=rng.choice([0.0, 1e-4]),
                update_s_per_byte=rng.choice([0.0, 2e-10, 2e-9]),
            ),
            whole_model=(),
            operation=operation,
        )
    )


def _layer(rng, k, sizes, storages, received) -> Layer:
    saves = [s for s in sorted({*received, f"s{k}"}) if rng.random() < 0.35]
    least = {
        m: sum(round(storages[s].fixed_bytes + storages[s].bytes_per_sample * m) for s in saves)
        for m in sizes
    }
    parameters = rng.choice([0, 0, 400_000, 1_000_000]) * rng.randint(1, 3)
    return Layer(
        name=f"l{k}",
        kind="Drawn",
        parameter_bytes=parameters,
        buffer_bytes=rng.choice([0, 0, 5_000]),
        saves=tuple(saves),
        measurements=_measurements(rng, sizes, rng.choice([0.2, 1.0, 1.0, 3.0]), least),
    )


def _measurements(rng, sizes, scale, least) -> tuple[Measurement, ...]:
    fixed, forward = rng.choice([0.0, 0.0, 1.5]) * scale * 1e-3, rng.uniform(0.1, 1) * scale * 1e-3
    ratio = rng.choice([0.0, 1.0, 2.0, 2.5]) if scale > 0.2 else 2.0
    saved = rng.choice([0, 100_000, 700_000])
    workspace = rng.choice([0, 0, 200_000])
    part = rng.choice([None, None, 0.3, 0.6, 1.0, 1.2])
    weight = rng.choice([None, 0.0, 0.5, 1.0])
    waits = rng.choice([None, 50_000])
    found = []
    for m in sizes:
        forward_s = fixed + forward * m
        backward_s = forward_s * ratio
        found.append(
            Measurement(
                micro_batch=m,
                forward_s=forward_s,
                backward_s=backward_s,
                saved_bytes=saved * m + (least[m] if least else 0),
                workspace_bytes=workspace * m,
                backward_input_s=None if part is None else part * backward_s,
                backward_weight_s=(None if part is None or weight is None else weight * backward_s),
                postponed_bytes=None if part is None or waits is None else waits * m,
            )
        )
    return tuple(found)


# Clusters ------------------------------------------------------------------------------------


def drawn_cluster(rng: random.Random) -> Cluster:
    """One to four devices without memory limits."""
    count = rng.choice([1, 2, 2, 3, 3, 3, 4])
    unequal = rng.random() < 0.3
    homes: list[str | None] = [None] * count
    if rng.random() < 0.5:
        ways = [[f"m{k // 2}" for k in range(count)], [f"m{k}" for k in range(count)]]
        ways += [[f"m{k % 2}" for k in range(count)], ["m0"] * (count - 1) + ["m1"]]
        homes = list(rng.choice(ways))
    devices = tuple(
        Device(
            name=f"d{k}",
            speed=rng.choice([1.0, 2.0, 1.5]) if unequal else 1.0,
            machine=homes[k],
        )
        for k in range(count)
    )
    between = _network(rng) if homes[0] is not None and rng.random() < 0.8 else None
    measured = None
    if rng.random() < 0.15:
        measured = AllReduce(processes=2, latency_s=1e-4, bandwidth_bytes_per_s=1e9)
    return Cluster(
        devices=devices,
        network=_network(rng),
        all_reduce=measured,
        between_machines=between,
    )


def of_kinds(rng: random.Random, profile: Profile, cluster: Cluster) -> tuple[Profile, Cluster]:
    """With devices of two or three kinds, whose seconds differ by layer and direction; mostly as a
    search is asked of them, with their kinds' speeds."""
    names = ["a", "b", "c"][: rng.choice([2, 3])]

    def times(name: str, field: str) -> tuple[tuple[float, ...], ...]:
        found = []
        for layer in profile.layers:
            factor = 1.0 if name == "a" else rng.choice([0.3, 0.8, 1.0, 2.0, 3.0])
            found.append(tuple(getattr(m, field) * factor for m in layer.measurements))
        return tuple(found)

    optimizer = profile.optimizer
    kinds = tuple(
        KindTimes(
            name=name,
            forward_s=times(name, "forward_s"),
            backward_s=times(name, "backward_s"),
            update_fixed_s=optimizer.update_fixed_s,
            update_s_per_byte=optimizer.update_s_per_byte * (1 if name == "a" else 2),
        )
        for name in names
    )
    profile = msgspec.structs.replace(profile, kinds=kinds, loss=(), operation=None, together=None)
    devices = tuple(
        msgspec.structs.replace(device, kind=rng.choice(names)) for device in cluster.devices
    )
    cluster = msgspec.structs.replace(cluster, devices=devices)
    check_profile(profile)
    if rng.random() < 0.8:
        cluster = with_speeds(cluster, profile)
    return least_of(profile, cluster.kinds), cluster


def far_apart(rng: random.Random, cluster: Cluster) -> Cluster:
    """Two to five devices like the first one, in two or three machines."""
    homes = [
        rng.choice("abc"[: rng.choice([2, 2, 3])]) for _ in range(rng.choice([2, 3, 3, 4, 4, 5]))
    ]
    first = cluster.devices[0]
    devices = tuple(
        msgspec.structs.replace(first, name=f"d{k}", machine=home)
        for k, home in enumerate(homes if rng.random() < 0.3 else sorted(homes))
    )
    speed, latency_s = rng.choice([1e4, 1e5, 1e6, 1e7]), rng.choice([0.0, 0.0, 1e-5])
    near = Network(bandwidth_bytes_per_s=speed, latency_s=latency_s)
    slower = speed / rng.choice([2, 5, 20, 100])
    between = Network(bandwidth_bytes_per_s=slower, latency_s=rng.choice([1, 3]) * latency_s)
    return Cluster(devices=devices, network=near, between_machines=between)


def with_links(rng: random.Random, cluster: Cluster) -> Cluster:
    """With links of some pairs, machines and groups, times by size, and sums of two and three."""
    devices = tuple(
        msgspec.structs.replace(device, group=rng.choice([None, "east", "west"]))
        for device in cluster.devices
    )
    names = {name for d in devices for name in (d.name, d.machine, d.group) if name}
    links = tuple(
        LinkBetween(
            between=(rng.choice(sorted(names)), rng.choice([ANY, *sorted(names)])),
            network=with_times(rng, _network(rng)),
        )
        for _ in range(rng.randint(1, 4))
    )
    sums = [
        AllReduce(processes=n, latency_s=1e-4, bandwidth_bytes_per_s=rng.choice([1e8, 1e9]))
        for n in (2, 3)
    ]
    between = cluster.between_machines
    return msgspec.structs.replace(
        cluster,
        devices=devices,
        network=with_times(rng, cluster.network),
        between_machines=between and with_times(rng, between),
        links=links,
        all_reduce=tuple(with_times(rng, each) for each in sums) if rng.random() < 0.4 else None,
    )


def with_times(rng: random.Random, link: Network | AllReduce) -> Network | AllReduce:
    """Half of them: by a table whose sizes have rates of their own."""
    if rng.random() < 0.5:
        return link
    seconds, times = link.latency_s, []
    for nbytes in sorted(rng.sample([100, 3_000, 40_000, 600_000, 5_000_000], rng.randint(1, 4))):
        rate = link.bandwidth_bytes_per_s * rng.choice([0.1, 0.5, 1.0, 2.0, 7.0])
        seconds = max(seconds + 1e-9, link.latency_s + nbytes / rate)
        times.append((float(nbytes), seconds))
    return msgspec.structs.replace(link, times=tuple(times))


def _network(rng: random.Random) -> Network:
    return Network(
        bandwidth_bytes_per_s=rng.choice([1e10, 1e9, 2e8, 1e8, 3e7]),
        latency_s=rng.choice([0.0, 1e-5, 5e-4, 3e-3]),
        half_duplex=rng.random() < 0.3,
        overlap=rng.random() >= 0.3,
    )


def with_memory(rng: random.Random, cluster: Cluster, plans: list[Evaluation]) -> Cluster:
    """Memory that some plan just fits, or just doesn't; or none."""
    way = rng.choice(["none", "none", "fits", "fits", "fits", "lacks", "own"])
    if way == "none":
        return cluster
    # Limits that are tight for good plans: of one of the better half.
    plans = sorted(plans, key=lambda found: found.prediction.period_s)
    wanted = rng.choice(plans[: max(len(plans) // 2, 1)])
    needs = [stage.memory_bytes for stage in wanted.prediction.stages]
    limits = [max(max(needs) - (way == "lacks"), 1)] * len(cluster.devices)
    if way == "own":
        for stage, need in zip(wanted.stages, needs, strict=True):
            for d in stage.devices:
                limits[d] = max(need, 1)
    devices = (
        msgspec.structs.replace(device, memory_bytes=limit)
        for device, limit in zip(cluster.devices, limits, strict=True)
    )
    return msgspec.structs.replace(cluster, devices=tuple(devices))


# All plans -----------------------------------------------------------------------------------


def counts_of(question: Question, asked: int | None) -> list[int]:
    """Every N: the one asked for, or each divisor of the mini-batch that was measured."""
    batch, sizes = question.mini_batch, question.profile.micro_batch_sizes
    if VARIANTS[question.variant].whole_mini_batches:
        return [1] if sizes[0] <= batch <= sizes[-1] else []
    wanted = [asked] if asked else [n for n in range(1, batch + 1) if batch % n == 0]
    return [n for n in wanted if sizes[0] <= -(-batch // n) <= sizes[-1]]


def cuts(
    question: Question, counts: Iterable[int], *, several: bool = False
) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to give layers stage numbers that never fall along an edge, none unused.

    Args:
        counts: numbers of stages.
        several: devices have several; `shares_devices` says which of these cuts suit them.
    """
    profile = question.profile
    names = [layer.name for layer in profile.layers]
    position = {name: k for k, name in enumerate(names)}
    pairs = [
        (position[e.producer], position[e.consumer])
        for e in profile.edges
        if e.consumer in position
    ]
    apart = several or question.tied == "split"
    free = [set(s.layers) for s in profile.shared] if apart else []
    bound = [group for group in profile.tied if set(group) not in free]
    for count in (count for count in counts if count <= len(names)):
        for stage in product(range(count), repeat=len(names)):
            if (
                len(set(stage)) == count
                and all(stage[a] <= stage[b] for a, b in pairs)
                and all(len({stage[position[n]] for n in group}) == 1 for group in bound)
            ):
                yield tuple(
                    tuple(name for name, at in zip(names, stage, strict=True) if at == s)
                    for s in range(count)
                )


def shares_devices(
    question: Question, nodes: tuple[tuple[str, ...], ...], lay: tuple[int, ...]
) -> bool:
    """Whether layers that share parameters are on one device, and of those that are on several
    stages of one the first waits for the others' gradients."""
    stage_of = {name: s for s, names in enumerate(nodes) for name in names}
    back = {
        (stage_of[e.producer], stage_of[e.consumer])
        for e in question.profile.edges
        if e.needs_grad and e.consumer in stage_of
    }

    def waits(s: int, t: int) -> bool:
        return s == t or any(waits(b, t) for a, b in back if a == s < b)

    for shared in question.profile.shared:
        stages = {stage_of[name] for name in shared.layers}
        if question.tied == "together" and len({lay[s] for s in stages}) > 1:
            return False
        for d in set(lay):
            mine = sorted(s for s in stages if lay[s] == d)
            if mine and not all(waits(mine[0], s) for s in mine):
                return False
    return True


def layouts(count: int, devices: int, sizes: list[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to lay stages over the devices in their order, some left out."""
    for each in product(sizes, repeat=count):
        spare = devices - sum(each)
        if spare < 0:
            continue
        # Gaps before the stages: a choice of `count` places among gaps and stages.
        for chosen in combinations(range(spare + count), count):
            first, found = 0, []
            for k, r in enumerate(each):
                first += chosen[k] - (chosen[k - 1] + 1 if k else 0)
                found.append(tuple(range(first, first + r)))
                first += r
            yield tuple(found)


def all_plans(
    question: Question, freedom: Freedom, asked: int | None
) -> Iterator[tuple[int, tuple[PlanStage, ...]]]:
    """(N, stages) of every plan, whether it fits or not."""
    variant, devices = VARIANTS[question.variant], len(question.cluster.devices)
    batch, sizes = question.mini_batch, question.profile.micro_batch_sizes
    chosen = ways_to_recompute(question, freedom.recompute)
    found = list(cuts(question, range(1, devices + 1)))
    for n in counts_of(question, asked):
        replicas = [1]
        if freedom.replicas and variant.whole_mini_batches:
            shares = [r for r in range(1, devices + 1) if batch % r == 0]
            replicas = [r for r in shares if sizes[0] <= batch // r]
        elif freedom.replicas:
            replicas = [r for r in range(1, devices + 1) if n % r == 0]
        for nodes in found:
            count = len(nodes)
            if variant.micro_batch_per_stage and n < count:
                continue
            vectors = falling(limit_ranges(variant, count, within=freedom.staleness))
            # A stage that has no layer of a set computes none again.
            ways = [dict.fromkeys(of_stage(each, mine) for each in chosen) for mine in nodes]
            for lay, again, limits in product(
                layouts(count, devices, replicas), product(*ways), vectors
            ):
                yield (
                    n,
                    tuple(
                        PlanStage(
                            nodes=nodes[s],
                            devices=lay[s],
                            in_flight=limits[s],
                            recompute=again[s],
                        )
                        for s in range(count)
                    ),
                )


def ways_to_recompute(question: Question, asked: str) -> Sequence[Selection]:
    """What stages may compute again where memory is limited; without limits, less is looked at."""
    devices = question.cluster.devices
    limited = tuple(msgspec.structs.replace(device, memory_bytes=1) for device in devices)
    cluster = msgspec.structs.replace(question.cluster, devices=limited)
    return Relaxation(replace(question, cluster=cluster), Freedom(recompute=asked)).recompute


def looked_at(question: Question, asked: str, plan: Evaluation) -> bool:
    """Whether a search looks at a plan's layers that are computed again."""
    ways = Relaxation(question, Freedom(recompute=asked)).recompute
    return all(
        any(of_stage(way, stage.nodes) == stage.recompute for way in ways) for stage in plan.stages
    )


def falling(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Every vector of limits that doesn't rise along the pipeline."""
    each = (range(low, high + 1) for low, high in ranges)
    return [v for v in product(*each) if all(a >= b for a, b in pairwise(v))]


# Several stages on each device -----------------------------------------------------------------


@dataclass(frozen=True)
class DrawnPlaced:
    """A question with several stages on each device, and all plans.

    Attributes:
        per_device, placement: as `SearchRequest` has them.
        plans: with at most as many stages on each device as are looked at.
    """

    question: Question
    recompute: str
    asked: int
    per_device: int | None
    placement: str
    plans: list[Evaluation]

    @property
    def best_s(self) -> float | None:
        """The shortest period there is; None where nothing fits."""
        fitting = [e for e in self.plans if not e.over_limit(self.question.cluster)]
        return min((found.prediction.period_s for found in fitting), default=None)


def drawn_placed(seed: int, most_plans: int = 150, *, linked: bool = False) -> DrawnPlaced | None:
    """The question with this number; None where it has too many plans, or none. `linked`: as of
    `drawn`."""
    rng = random.Random(seed)
    variant = VARIANTS[rng.choice(sorted(VARIANTS))]
    profile, cluster = drawn_profile(rng), drawn_cluster(rng)
    cluster = msgspec.structs.replace(cluster, devices=cluster.devices[:3])
    if linked:
        cluster = with_links(random.Random(-seed), cluster)
    tied = rng.choice(["together", "split"]) if variant.flushes else "together"
    question = Question(
        profile,
        cluster,
        variant.name,
        profile.batch_size,
        rng.choice([0.0, 1.0]),
        rng.choice([1, 1, 2]),
        tied,
    )
    ways = ["off", "off", "on", "auto", "selective"]
    again = "off" if variant.recompute_refusal else rng.choice(ways)
    placement = rng.choice(["auto", "loop", "v"]) if variant.placement == "any" else "auto"
    per_device = rng.choice([2, 2, None])
    counts = counts_of(question, None)
    if not counts:
        return None
    n = rng.choice(counts)
    # As above.
    asked = list(islice(placed_plans(question, n, again, per_device, placement), most_plans + 1))
    if len(asked) > most_plans:
        return None
    plans = []
    for stages in asked:
        # Parts of a graph that nothing connects may wait for each other on one device.
        with suppress(ScheduleError):
            plan = evaluate(question, stages, n)
            # Runs refuse those that don't know how far their predictions look ahead.
            prediction_distances(variant, make_schedule(plan.pipeline, 4))
            plans.append(plan)
    if not plans:
        return None
    question = replace(question, cluster=with_memory(rng, cluster, plans))
    plans = [plan for plan in plans if looked_at(question, again, plan)]
    return DrawnPlaced(question, again, n, per_device, placement, plans)


def placed_plans(
    question: Question, n: int, again: str, per_device: int | None, placement: str
) -> Iterator[tuple[PlanStage, ...]]:
    """Every plan with several stages on each device; with one, too, where any number may be."""
    variant, devices = VARIANTS[question.variant], len(question.cluster.devices)
    chosen = ways_to_recompute(question, again)
    kinds = ["loop", "v"] if placement == "auto" else [placement]
    if variant.placement != "any":
        kinds = [variant.placement]
    lays = set()
    for used in (c for d in range(1, devices + 1) for c in combinations(range(devices), d)):
        if "loop" in kinds:
            lays |= {used * v for v in ([per_device] if per_device else range(2, 5))}
        if "v" in kinds and (len(used) > 1 or variant.placement == "any"):
            lays.add(used + used[::-1])
            if len(used) > 1 and variant.placement == "any":
                lays.add(used + used[-2::-1])
        if per_device is None and placement == "auto":
            if variant.placement == "any":
                lays.add(used)
            lays.add(used[:1])
    for nodes in cuts(question, sorted(set(map(len, lays))), several=True):
        if variant.micro_batch_per_stage and n < len(nodes):
            continue
        for lay in (lay for lay in lays if len(lay) == len(nodes)):
            if not shares_devices(question, nodes, lay):
                continue
            several = len(set(lay)) < len(lay)
            ways = [dict.fromkeys(of_stage(each, mine) for each in chosen) for mine in nodes]
            for again, limits in product(
                product(*ways),
                falling(limit_ranges(variant, len(lay), several=several, within=StalenessBounds())),
            ):
                yield tuple(
                    PlanStage(
                        nodes=mine,
                        devices=(d,),
                        in_flight=limit,
                        recompute=way,
                    )
                    for mine, d, limit, way in zip(nodes, lay, limits, again, strict=True)
                )
