"""What the search makes of some 250 questions, frozen: `golden.json` beside this file.

    python -m timeprest.tests.planner.search.golden [--write] [WORD ...]

Plans them anew and says row by row what got better or worse; with words, those alone whose names
have one of them. `--write` freezes what came out. A search ends by proof or by its effort, never by
time, so rows are the same everywhere. Questions say all that a search may choose, so that they stay
the same where a default becomes another.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from timeprest.planner.cluster.cluster import Cluster, Device
from timeprest.planner.cluster.headroom import Headroom
from timeprest.planner.cluster.links import Network
from timeprest.planner.search import state
from timeprest.planner.search.solve import solve
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import InfeasibleError, PlanError
from timeprest.profiles.profile import Profile, SharedParameters
from timeprest.tests.benchmarks.planner import published, sequences
from timeprest.tests.helpers.by_hand.profiles import profile_by_hand, row_of_layers
from timeprest.tests.helpers.drawn.questions import drawn_cluster, drawn_profile

TABLE = Path(__file__).with_suffix(".json")

EFFORT = state.EFFORT // 125
"""For each, of what a search has by itself: so little that all of them take a minute or two."""

LISTED = 10
"""Times as much where a list schedule makes what stages run: it is counted so much dearer."""

SAME = 1e-9
"""Periods that differ by less are the same."""

LOOSER = 0.01
"""A bound that isn't met may be so much lower: another search spends its effort otherwise."""

STEADY: dict[str, Any] = {"run_ahead": "auto", "tolerance": 0.0, "headroom": Headroom()}
"""What no question is about, and might have another default some day."""

SLOWEST_S = 3.0
"""A row that takes longer isn't taken in: effort doesn't end every part of a search soon enough."""

CLUSTERS = 56
"""Drawn clusters of docs/planner_sequences.md to look at; half of them take longer."""

MOST_IN_SEQUENCES = 3
"""Sequences of more devices aren't tried."""

PER_SYSTEM = 11
"""Drawn questions, of which every fourth is small."""


@dataclass(frozen=True)
class Asked:
    """A question: as `solve` takes it."""

    profile: Profile
    cluster: Cluster
    variant: str
    options: dict[str, Any]


class Frozen(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of a question; no period: nothing was found to fit, or there can be none."""

    period_s: float | None = None
    bound_s: float | None = None
    proven: bool = False


# Drawn ------------------------------------------------------------------------------------------


def drawn(system: str, number: int) -> Asked:
    """A question of this system: equal devices or two kinds, memory from tight to none."""
    rng = random.Random(f"{system} {number}")
    variant = VARIANTS[system]
    small = number % 4 == 3
    profile = drawn_profile(rng) if small else rng.choice([transformer, convolutions])(rng)
    batch = profile.batch_size
    tied = rng.choice(["together", "split"]) if variant.flushes else "together"
    again = "off" if variant.recompute_refusal else rng.choice(["off", "off", "on", "auto", "auto"])
    counts = [n for n in range(1, batch + 1) if batch % n == 0]
    counts = [n for n in counts if batch // n in profile.micro_batch_sizes]
    micro_batches = None if variant.whole_mini_batches else rng.choice([None, *counts])
    per_device, placement = 1, "auto"
    if variant.placement != "any":
        per_device = 2
    elif rng.random() < 0.3:
        per_device, placement = rng.choice([(2, "loop"), (2, "v"), (3, "loop"), (None, "auto")])
    cluster = drawn_cluster(rng) if small else everyday_cluster(rng, profile)
    options = {
        "micro_batches": micro_batches,
        "stages": None,
        "replicas": per_device == 1 and rng.random() < 0.3,
        "stages_per_device": per_device,
        "placement": placement,
        "sequence": rng.choice(["listed", "best"]),
        "recompute": again,
        "tied": tied,
        "update_every": rng.choice([1, 1, 1, 2]),
        "mini_batch": batch,
        "optimizer_state_factor": rng.choice([0.0, 1.0, 2.0]),
    }
    return Asked(profile, cluster, system, options)


def transformer(rng: random.Random) -> Profile:
    """An embedding, blocks of two layers with what goes round each of them, and a head."""
    blocks, width = rng.randint(3, 10), rng.choice([64, 128, 256])
    layers: list[tuple[Any, ...]] = [("embed", 400 * width, 2e-5, 2e-5, width, [])]
    edges, last, stream = [], "embed", "embed"
    for k in range(blocks):
        for part, share in (("attention", 4), ("mlp", 8)):
            name, used = f"{part}{k}", {last, stream}
            edges += [(u, name, f"t_{u}", 4 * width * 16) for u in sorted(used)]
            seconds = share * width * 1e-6 * rng.uniform(0.9, 1.1)
            own = 64 * width * rng.randint(2, 4)
            layers.append((name, share * width * width, seconds, 2 * seconds, own, [f"t_{last}"]))
            stream, last = last, name
    head = rng.choice([5, 30, 200]) * width
    edges.append((last, "head", f"t_{last}", 4 * width * 16))
    edges.append(("head", "output", "t_head", 4 * head))
    seconds = head * rng.choice([2e-7, 2e-6])
    layers.append(("head", 400 * width, seconds, 2 * seconds, 0, []))
    profile = profile_by_hand(layers, edges, sizes=(1, 2, 4, 8))
    if rng.random() < 0.2:
        group = ("embed", "head")
        shared = SharedParameters(layers=group, parameter_bytes=400 * width)
        profile = msgspec.structs.replace(profile, tied=(group,), shared=(shared,))
    return with_fixed_costs(rng, profile)


def convolutions(rng: random.Random) -> Profile:
    """Activations become small and parameters many from the input to the output."""
    count = rng.randint(6, 24)
    layers, edges = [], []
    for k in range(count):
        share = k / count
        nbytes = round(400_000 * 0.02**share * rng.uniform(0.5, 1.5))
        seconds = 1e-3 * rng.choice([0.1, 0.5, 1.0, 1.0, 3.0])
        parameters = round(2_000 * 500**share * rng.choice([0, 0.5, 1, 2]))
        saves = [f"t{k - 1}"] if k and rng.random() < 0.7 else []
        back = seconds * rng.uniform(1.5, 2.5)
        layers.append((f"n{k}", parameters, seconds, back, nbytes // 2, saves))
        target = f"n{k + 1}" if k + 1 < count else "output"
        edges.append((f"n{k}", target, f"t{k}", nbytes))
        if k + 2 < count and rng.random() < 0.2:
            edges.append((f"n{k}", f"n{k + 2}", f"t{k}", nbytes))
    return with_fixed_costs(rng, profile_by_hand(layers, edges, sizes=(1, 2, 4, 8)))


def with_fixed_costs(rng: random.Random, profile: Profile) -> Profile:
    """Or without: what a layer takes whatever the samples."""
    fixed_s = rng.choice([0.0, 0.0, 5e-5])
    layers = tuple(
        msgspec.structs.replace(
            layer,
            measurements=tuple(
                msgspec.structs.replace(
                    m, forward_s=m.forward_s + fixed_s, backward_s=m.backward_s + 2 * fixed_s
                )
                for m in layer.measurements
            ),
        )
        for layer in profile.layers
    )
    return msgspec.structs.replace(profile, layers=layers)


def everyday_cluster(rng: random.Random, profile: Profile) -> Cluster:
    """One to eight devices of one kind or two; memory of 1.5 to 10 even shares, or no limit."""
    count = rng.choice([1, 2, 2, 3, 4, 4, 5, 6, 8])
    kinds = 1 if count == 1 or rng.random() < 0.6 else 2
    held = sum(
        3 * layer.parameter_bytes + layer.measurements[-1].saved_bytes for layer in profile.layers
    )
    room = rng.choice([None, None, 1.5, 2.5, 4.0, 10.0])
    speeds, rooms = (1.0, rng.choice([0.4, 0.7, 2.0])), (1.0, rng.choice([0.5, 1.0, 2.0]))
    of = [int(kinds == 2 and k >= count // 2) for k in range(count)]
    if rng.random() < 0.3:
        rng.shuffle(of)
    home = rng.choice([None, None, 2, 4])
    devices = tuple(
        Device(
            name=f"d{k}",
            speed=speeds[kind],
            memory_bytes=room and round(room * rooms[kind] * held / count) + 1,
            machine=f"m{k // home}" if home else None,
        )
        for k, kind in enumerate(of)
    )
    bandwidth, latency_s = rng.choice([1e11, 1e10, 1e9, 2e8]), rng.choice([0.0, 1e-5, 2e-4])
    network = Network(bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)
    between = Network(bandwidth_bytes_per_s=bandwidth / 4, latency_s=latency_s) if home else None
    return Cluster(devices=devices, network=network, between_machines=between)


# Published, and drawn clusters for published workloads -----------------------------------------

ORDINARY = {
    "stages": None,
    "stages_per_device": 1,
    "placement": "auto",
    "sequence": "listed",
    "recompute": "off",
    "tied": "together",
    "update_every": 1,
}


FLUSHES = "pipedream-flush"


def published_rows() -> Iterator[tuple[str, Callable[[], Asked]]]:
    """PipeDream's workloads under our own cost model, also where the pipeline flushes; none where
    the files are missing."""

    def asked(own: published.OwnCase, system: str, micro_batches: int | None) -> Asked:
        options = {"micro_batches": micro_batches, "replicas": own.replicas}
        return Asked(own.profile(), own.cluster, system, {**ORDINARY, **options})

    for case in published.pipedream_cases():
        assert case.own is not None
        name = f"published {case.label}, {len(case.own.cluster.devices)} devices"
        yield name, partial(asked, case.own, published.SYSTEM, published.MICRO_BATCHES)
        if not case.own.replicas:
            # Messages past several stages decide here, over slow links.
            yield f"{name}, {FLUSHES}", partial(asked, case.own, FLUSHES, None)


def sequence_rows() -> Iterator[tuple[str, Callable[[], Asked]]]:
    """The first of the drawn clusters of docs/planner_sequences.md."""

    def asked(seed: int) -> Asked:
        case = sequences.drawn(seed)
        profile = sequences.profile_of(case.workload)
        sequence = "best" if len(case.cluster.devices) <= MOST_IN_SEQUENCES else "listed"
        options = {"sequence": sequence, "micro_batches": None, "replicas": False}
        options["optimizer_state_factor"] = 1.0
        return Asked(profile, case.cluster, case.system, {**ORDINARY, **options})

    if sequences.DATA.exists():
        for seed in range(CLUSTERS):
            yield f"sequences {seed}", partial(asked, seed)


def filled() -> Asked:
    """Of layers that hold much, each must be alone on its stage: where cuts are even in time, they
    lie together."""
    layers = [(f"n{k}", 10, 1e-3, 2e-3, 4000 if k < 4 else 10, []) for k in range(20)]
    profile = row_of_layers(layers, 8, 4)
    cluster = Cluster(
        devices=tuple(Device(name=f"d{k}", memory_bytes=20_000) for k in range(2)),
        network=Network(bandwidth_bytes_per_s=1e9, latency_s=1e-5),
    )
    placed = {"stages_per_device": 2, "placement": "v", "recompute": "on"}
    options = {**ORDINARY, "micro_batches": None, "replicas": False, **placed}
    return Asked(profile, cluster, "timeprest", options)


@cache
def rows() -> dict[str, Callable[[], Asked]]:
    """Each question's name, and what makes it."""
    found: dict[str, Callable[[], Asked]] = {
        f"drawn {system} {k}": partial(drawn, system, k)
        for system in sorted(VARIANTS)
        for k in range(PER_SYSTEM)
    }
    found["filled timeprest"] = filled
    found.update(published_rows())
    found.update(sequence_rows())
    return found


# Planning them, and what is better ---------------------------------------------------------------


def planned(asked: Asked) -> Frozen:
    """What the search makes of it."""
    try:
        plan = solve(
            asked.profile,
            asked.cluster,
            asked.variant,
            **{**STEADY, **asked.options},
            solver="dp",
            time_limit_s=None,
            effort=EFFORT * (LISTED if VARIANTS[asked.variant].schedule == "nf1b" else 1),
        )
    except (InfeasibleError, PlanError):
        return Frozen()
    return Frozen(plan.predicted.period_s, plan.solver.bound_s, plan.solver.optimal)


class Judgement(NamedTuple):
    """Of a row planned anew, beside the frozen one.

    Attributes:
        worse, better: what is so; empty: nothing.
    """

    worse: str = ""
    better: str = ""


def judged(frozen: Frozen, found: Frozen) -> Judgement:
    """Whether a row may stand: no longer period, no proof lost, no bound beyond a known plan's."""
    if frozen.period_s is None or frozen.bound_s is None:
        return Judgement() if found.period_s is None else Judgement(better="a plan")
    if found.period_s is None or found.bound_s is None:
        return Judgement("no plan any more")
    periods = f"{1e3 * frozen.period_s:.6g} → {1e3 * found.period_s:.6g} ms"
    change = found.period_s / frozen.period_s - 1
    if change > SAME:
        return Judgement(f"period {periods}, {change:+.2%}")
    if found.period_s < frozen.bound_s * (1 - SAME):
        return Judgement(f"period {periods}, under what was the bound")
    if found.bound_s > frozen.period_s * (1 + SAME):
        return Judgement(f"a bound of {1e3 * found.bound_s:.6g} ms, beyond a plan of {periods}")
    if frozen.proven and not found.proven:
        return Judgement(f"no proof any more: bound {1e3 * found.bound_s:.6g} ms of {periods}")
    bounds = f"bound {1e3 * frozen.bound_s:.6g} → {1e3 * found.bound_s:.6g} ms"
    if found.bound_s < frozen.bound_s * (1 - LOOSER) and not found.proven:
        return Judgement(bounds)
    if change < -SAME:
        return Judgement(better=f"period {periods}, {change:+.2%}")
    if found.proven and not frozen.proven:
        return Judgement(better="proven")
    return Judgement(better=bounds if found.bound_s > frozen.bound_s * (1 + LOOSER) else "")


def frozen_table() -> dict[str, Frozen]:
    """All rows by name."""
    return msgspec.json.decode(TABLE.read_bytes(), type=dict[str, Frozen])


class TooSlow(BaseException):
    """A new row takes longer than `SLOWEST_S`."""


def _too_slow(*_: object) -> None:
    raise TooSlow


def main() -> None:
    """Plan all rows anew."""
    parser = argparse.ArgumentParser(description="Plan the questions of the golden table anew.")
    parser.add_argument("words", nargs="*", metavar="WORD", help="rows whose names have one")
    parser.add_argument("--write", action="store_true", help="freeze what came out")
    asked = parser.parse_args()
    table = frozen_table() if TABLE.exists() else {}
    names = [name for name in rows() if not asked.words or any(w in name for w in asked.words)]
    counts = {"worse": 0, "better": 0, "new": 0}
    began = time.process_time()
    signal.signal(signal.SIGVTALRM, _too_slow)
    for name in names:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0 if name in table else SLOWEST_S)
        try:
            found = planned(rows()[name]())
        except TooSlow:
            continue
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if name not in table:
            counts["new"] += 1
        else:
            judgement = judged(table[name], found)
            for way, what in zip(judgement._fields, judgement, strict=True):
                if what:
                    counts[way] += 1
                    print(f"{way:6}  {name}: {what}", flush=True)
        table[name] = found
    spent = time.process_time() - began
    print(f"{len(names)} rows, {spent:.0f} s of a processor:", end=" ")
    print(", ".join(f"{count} {way}" for way, count in counts.items()))
    if asked.write:
        known = {name: table[name] for name in (*rows(), *table) if name in table}
        lines = (f"{json.dumps(k)}: {msgspec.json.encode(v).decode()}" for k, v in known.items())
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        print(f"wrote {TABLE}")


if __name__ == "__main__":
    main()
