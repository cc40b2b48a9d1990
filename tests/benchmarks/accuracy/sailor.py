"""Sailor's published files (SOSP'25, github.com/eth-easl/sailor): tables of layers and links, and
measured runs; what a run costs by them, as `tp-plan` reckons for DeepSpeed.

A tensor-parallel group counts as one device. Times are those measured at the run's own micro-batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, gcd, inf, log2, sqrt
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from timeprest.planner.engine_costs import ENGINE_COSTS, EngineCosts, on_engine, with_receives
from timeprest.planner.schedules.steady_state import steady_state
from timeprest.planner.simulator.pipeline import Link, Pipeline, Route
from timeprest.planner.systems.variants import variant_named
from timeprest.profiles.errors import FileError

DEEPSPEED = ENGINE_COSTS["deepspeed"]

FLOAT = 4
"""Bytes: they trained in float32."""

PARAMETERS = "params_floats"

ADAM = 2
"""Floats of optimizer state for each parameter."""


class Group(NamedTuple):
    """A tensor-parallel group: its GPUs' type, how many, and where."""

    gpu: str
    ranks: int
    zone: str


@dataclass(frozen=True)
class Run:
    """A measured run.

    Attributes:
        stages: per stage, its layers.
        groups: per stage, its replicas.
        micro_batch, mini_batch: samples.
        period_s: measured, of an iteration.
        sync_s: measured, of summing gradients; None: it isn't there.
        memory_bytes: measured by nvidia-smi, the most of any GPU; None: it isn't there.
    """

    name: str
    model: str
    stages: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[Group, ...], ...]
    micro_batch: int
    mini_batch: int
    period_s: float
    sync_s: float | None
    memory_bytes: int | None

    @property
    def setting(self) -> tuple[object, ...]:
        """What was run; two names may stand for one run."""
        return self.stages, self.groups, self.micro_batch, self.mini_batch

    @property
    def layers(self) -> int:
        """Of the model."""
        return sum(map(len, self.stages))

    @property
    def replicas(self) -> int:
        """Of the stage with the fewest."""
        return min(map(len, self.groups))

    @property
    def each(self) -> int:
        """Micro-batches that a replica runs in an iteration."""
        return ceil(self.mini_batch / (self.micro_batch * self.replicas))

    @property
    def devices(self) -> int:
        """GPUs, all ranks counted."""
        return sum(group.ranks for stage in self.groups for group in stage)

    @property
    def gpus(self) -> frozenset[str]:
        """Types."""
        return frozenset(group.gpu for stage in self.groups for group in stage)


@dataclass(frozen=True)
class Figures:
    """What isn't in the tables, of a cluster.

    Attributes:
        receive_bytes_per_s: at which a group's ranks take in what they received.
        sync: a sum of gradients takes so many times a ring at the link's bandwidth,
        sync_s: and so many seconds besides.
        context_bytes: of a GPU's process, besides tensors.
        cached: bytes that the allocator has for each byte of activations.
    """

    receive_bytes_per_s: float = inf
    sync: float = 1.0
    sync_s: float = 0.0
    context_bytes: float = 0.0
    cached: float = 1.0


NOTHING = Figures()


@dataclass(frozen=True)
class Tables:
    """Their tables, as they are."""

    profiles: Mapping[str, Any]
    facts: Mapping[str, Any]
    between: Mapping[str, Any]

    def seconds(
        self, run: Run, s: int, group: Group, *, tied: bool = True
    ) -> tuple[float, float, float]:
        """Forward, backward and update of a stage on a group of its replicas.

        Args:
            tied: a head that is tied counts, though the table doesn't have it.
        """
        layers = self._layers(run.model, group, run.micro_batch)
        mine = [layers[k] for k in run.stages[s]]
        head = self._tied_head(run, s, group) if tied else (0.0, 0.0)
        timed = sum(self.fact(run, k, group.ranks, PARAMETERS) for k in self._timed(run))
        share = self.stage_bytes(run, s, group.ranks, PARAMETERS) / timed
        forward_s, backward_s = (sum(x[k] for x in mine) + head[k] for k in (0, 1))
        return forward_s, backward_s, self.update_s(run, group) * share

    def update_s(self, run: Run, group: Group) -> float:
        """Of what they timed: a model of its first two blocks and both ends."""
        return self._layers(run.model, group, run.micro_batch)[0][2]

    def _timed(self, run: Run) -> tuple[int, ...]:
        return 0, 1, 2, run.layers - 1

    def _layers(self, model: str, group: Group, micro_batch: int) -> list[list[float]]:
        """Per layer its seconds; between sizes that were measured, on a line."""
        sizes = self.profiles[model].get(group.gpu, {})
        found = {
            int(size): [[float(x) for x in layer] for layer in by_ranks[str(group.ranks)].values()]
            for size, by_ranks in sizes.items()
            if str(group.ranks) in by_ranks
        }
        if micro_batch in found:
            return found[micro_batch]
        below = max((size for size in found if size < micro_batch), default=None)
        above = min((size for size in found if size > micro_batch), default=None)
        if below is None or above is None:
            raise FileError(
                f"no profile of {model} on {group.gpu}, {group.ranks} ranks, has a micro-batch of "
                f"{micro_batch}, or one on either side"
            )
        share = (micro_batch - below) / (above - below)
        return [
            [low + share * (high - low) for low, high in zip(*ends, strict=True)]
            for ends in zip(found[below], found[above], strict=True)
        ]

    def has_head(self, model: str) -> bool:
        """Whether its table has the product with the vocabulary: not where weights are tied, which
        Megatron-DeepSpeed's `GPTModelPipe` does in no layer of its own."""
        layers = list(_found(self.facts, "llm_info.json", model, "1").values())
        return bool(layers[-1][PARAMETERS] > layers[0][PARAMETERS] / 2)

    def _tied_head(self, run: Run, s: int, group: Group) -> tuple[float, float]:
        """Forward and backward of a head that the table doesn't have: as another model's on such
        GPUs; what goes with the logits is alike, the product goes with the width, so with its
        square root."""
        other = self.other_head(run, s, group)
        if other is None:
            return 0.0, 0.0
        widths = (self.facts[m]["1"]["1"]["act_output_floats"] for m in (run.model, other))
        mine, theirs = widths
        head = self._layers(other, group, run.micro_batch)[-1]
        factor = sqrt(mine / theirs)
        return head[0] * factor, head[1] * factor

    def other_head(self, run: Run, s: int, group: Group) -> str | None:
        """The model whose head stands for a stage's own; None: it needs none, or there is none."""
        if s < len(run.stages) - 1 or self.has_head(run.model):
            return None
        for model in self.profiles:
            try:
                self._layers(model, group, run.micro_batch)
                if self.has_head(model):
                    return model
            except FileError:
                continue
        return None

    def fact(self, run: Run, layer: int, ranks: int, name: str, model: str = "") -> float:
        """Bytes of a layer on one of its ranks; of activations, for a sample."""
        layers = _found(self.facts, "llm_info.json", model or run.model, str(ranks))
        return float(layers[str(layer % len(layers))][name]) * FLOAT

    def stage_bytes(self, run: Run, s: int, ranks: int, name: str) -> float:
        """Of a stage, likewise; with a head that is tied."""
        found = sum(self.fact(run, layer, ranks, name) for layer in run.stages[s])
        if other := self.other_head(run, s, Group(min(run.gpus), ranks, "")):
            tied = name == PARAMETERS
            model, layer = ("", 0) if tied and s else (other, -1)
            found += 0.0 if tied and not s else self.fact(run, layer, ranks, name, model)
        return found

    def message_bytes(self, run: Run, s: int) -> float:
        """That all ranks of a stage send to the next one's for a micro-batch."""
        return self.fact(run, run.stages[s][-1], 1, "act_output_floats") * run.micro_batch

    def curve(self, a: Group, b: Group, ranks: tuple[int, int] | None = None) -> list[float]:
        """GB/s from one group to another, as a polynomial of log2 of MB."""
        here, there = ranks or (a.ranks, b.ranks)
        names = a.zone, a.gpu, str(here), b.zone, b.gpu, str(there)
        return [float(c) for c in _found(self.between, "multizone_bandwidths_het.json", *names)[0]]

    def link_s(self, a: Group, b: Group, nbytes: float) -> float:
        """A message's time between two groups."""
        return nbytes / bytes_per_s(self.curve(a, b), nbytes)

    def ring_s(self, run: Run, s: int) -> float:
        """Summing a stage's gradients over its replicas, at its slowest link's bandwidth."""
        groups = run.groups[s]
        n = len(groups)
        if n < 2:
            return 0.0
        ranks = min(group.ranks for group in groups)
        chunk = self.stage_bytes(run, s, ranks, PARAMETERS) * ranks / n
        ends = zip(groups, (*groups[1:], groups[0]), strict=True)
        return 2 * (n - 1) * max(self.link_s(a, b, chunk) for a, b in ends)


def _found(table: Any, where: str, *names: str) -> Any:
    """What a table of tables has by these names. Raises FileError."""
    for k, name in enumerate(names):
        if name not in table:
            within = f" of {' / '.join(names[:k])}" if k else ""
            raise FileError(f"{where} has no {name}{within}, only {', '.join(table) or 'nothing'}")
        table = table[name]
    return table


def bytes_per_s(curve: Sequence[float], nbytes: float) -> float:
    """What a curve gives for a message of so many bytes."""
    x = log2(nbytes / 1e6)
    return sum(c * x**power for power, c in enumerate(reversed(curve))) * 1e9


# Reading ------------------------------------------------------------------------------------------

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Number = Annotated[int, msgspec.Meta(ge=1)]


class _Pipeline(msgspec.Struct):
    """Per stage, its layers; and its replicas, each a list of GPUs and how many ranks they are."""

    layers_per_stage: list[Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]]
    tmp_per_stage: list[
        Annotated[list[tuple[list[tuple[str, int, str]], Number]], msgspec.Meta(min_length=1)]
    ]


class _RunFile(msgspec.Struct):
    """A measured run as its file has it (`Run`)."""

    pipeline_list: list[_Pipeline]
    mbs: Number
    gbs: Number
    real: Seconds
    red_grads: float | None = None
    max_mem: Annotated[float, msgspec.Meta(ge=0)] | None = None


def read_tables(*folders: Path) -> Tables:
    """Of the first of these folders, or of those above them, that has them. Raises FileError."""
    for place in (above for folder in folders for above in (folder, *folder.resolve().parents)):
        if (place / "profiles_tmp.json").is_file():
            names = ("profiles_tmp.json", "llm_info.json", "multizone_bandwidths_het.json")
            return Tables(*(_json(place / name) for name in names))
    raise FileError(f"{folders[0]}: has no profiles_tmp.json, nor has a folder above it")


def read_runs(folder: Path, tables: Tables) -> tuple[list[Run], list[str]]:
    """All measured runs below a folder that the tables have all of, by name; and a line for each of
    the others. Raises FileError where there are none."""
    runs, lines = list[Run](), list[str]()
    for path in sorted(folder.rglob("*.json")):
        said = _json(path)
        if not isinstance(said, dict) or "pipeline_list" not in said:
            continue
        name = path.relative_to(folder).as_posix()[:-5]
        name = name.replace("validation/", "").replace("plan_config_", "")
        try:
            run = _run(name, msgspec.convert(said, _RunFile), tables)
            Reckoned(tables, run).pipeline  # noqa: B018
        except (FileError, msgspec.ValidationError) as error:
            lines.append(f"{name}: not predicted: {error}")
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            lines.append(f"{name}: not predicted: its tables lack something: {error!r}")
        else:
            runs.append(run)
    if not runs:
        why = lines[0] if lines else "has no measured runs (JSON with pipeline_list and real)"
        raise FileError(f"{folder}: {why}")
    return runs, lines


def _run(name: str, said: _RunFile, tables: Tables) -> Run:
    if len(said.pipeline_list) != 1:
        raise FileError(f"{len(said.pipeline_list)} pipelines, where one is read")
    (pipeline,) = said.pipeline_list
    stages = tuple(pipeline.layers_per_stage)
    layers = [layer for stage in stages for layer in stage]
    if len(stages) != len(pipeline.tmp_per_stage) or layers != list(range(len(layers))):
        raise FileError("its stages aren't all layers in a row, with replicas of each")
    groups = tuple(
        tuple(_group(gpus, ranks) for gpus, ranks in stage) for stage in pipeline.tmp_per_stage
    )
    return Run(
        name=name,
        model=_model(len(layers), groups[0][0].gpu, tables, name),
        stages=stages,
        groups=groups,
        micro_batch=said.mbs,
        mini_batch=said.gbs,
        period_s=said.real,
        sync_s=said.red_grads,
        memory_bytes=round(said.max_mem) if said.max_mem else None,
    )


def _group(gpus: list[tuple[str, int, str]], ranks: int) -> Group:
    kinds = {(gpu, zone) for gpu, _, zone in gpus}
    if len(kinds) != 1:
        raise FileError(f"a group of {len(kinds)} kinds of GPUs, where one is read")
    ((gpu, zone),) = kinds
    return Group(gpu, ranks, zone)


def _model(layers: int, gpu: str, tables: Tables, name: str) -> str:
    """The one model of so many layers that was profiled on such a GPU; of several, the named."""
    found = [
        model
        for model, by_gpu in tables.profiles.items()
        if gpu in by_gpu and model in tables.facts
        if len(next(iter(tables.facts[model].values()))) == layers
    ]
    if len(found) > 1:
        found = [model for model in found if model in name]
    if len(found) != 1:
        raise FileError(f"the profiles have {len(found)} models of {layers} layers on {gpu}")
    return found[0]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"{path}: isn't there") from None
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: can't be read: {error}") from None


# Predicting ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reckoned:
    """A run, as the tables have it.

    Attributes:
        overlap: devices compute while they send and receive.
    """

    tables: Tables
    run: Run
    overlap: bool = True

    @cached_property
    def pipeline(self) -> Pipeline:
        """Without what `Figures` say; gradients summed by a ring."""
        run = self.run
        times = [
            [self.tables.seconds(run, s, group) for group in groups]
            for s, groups in enumerate(run.groups)
        ]
        slowest = [max(mine, key=lambda t: t[0] + t[1]) for mine in times]
        paces = tuple(
            tuple((t[0] + t[1]) / (slow[0] + slow[1]) for t in mine)
            for mine, slow in zip(times, slowest, strict=True)
        )
        return Pipeline(
            variant=variant_named("pipedream-flush"),
            micro_batches=run.each * run.replicas,
            forward_s=tuple(t[0] for t in slowest),
            backward_s=tuple(t[1] for t in slowest),
            update_s=tuple(max(t[2] for t in mine) for mine in times),
            links=tuple(self._link(s) for s in range(len(run.stages) - 1)),
            limits=(1,) * len(run.stages),
            paces=paces if any(len(mine) > 1 for mine in paces) else (),
            all_reduce_s=tuple(self.tables.ring_s(run, s) for s in range(len(run.stages))),
        )

    def _link(self, s: int) -> Link:
        here, there = self.run.groups[s : s + 2]
        nbytes = self.tables.message_bytes(self.run, s)
        routes = tuple(
            Route(
                source=i,
                target=j,
                forward_s=self.tables.link_s(a, b, nbytes),
                backward_s=self.tables.link_s(b, a, nbytes),
                latency_s=0.0,
                wire=(s, i, j),
                wire_back=(s, i, j, "back"),
                overlaps=self.overlap,
            )
            for i, a in enumerate(here)
            for j, b in enumerate(there)
            if (i - j) % gcd(len(here), len(there)) == 0
        )
        longest = max(r.forward_s for r in routes), max(r.backward_s for r in routes)
        return Link(s, s + 1, *longest, 0.0, routes=routes)

    def period_s(self, figures: Figures = NOTHING, engine: EngineCosts = DEEPSPEED) -> float:
        """By simulation."""
        run, pipeline = self.run, self.pipeline
        sent = [self.tables.message_bytes(run, s) for s in range(len(run.stages) - 1)]
        # Each of a group's ranks puts the whole message together.
        ranks = [max(group.ranks for group in groups) for groups in run.groups]
        came = zip(ranks, [0.0, *sent], [*sent, 0.0], strict=True)
        received = [(n * activations, n * gradients) for n, activations, gradients in came]
        busier = with_receives(pipeline, received, figures.receive_bytes_per_s)
        sums = tuple(
            figures.sync_s + seconds * figures.sync if seconds else 0.0
            for seconds in pipeline.all_reduce_s
        )
        return steady_state(on_engine(replace(busier, all_reduce_s=sums), engine)).period_s

    def memory_bytes(self, figures: Figures = NOTHING) -> float:
        """Of the fullest rank."""
        return max(
            figures.context_bytes + held + figures.cached * kept for held, kept in self.held()
        )

    def held(self) -> Iterator[tuple[float, float]]:
        """Per stage and replica, bytes that a rank has for parameters, and keeps of activations."""
        run, tables = self.run, self.tables
        copies = 2 + ADAM + DEEPSPEED.parameter_copies
        for s, groups in enumerate(run.groups):
            in_flight = min(len(run.stages) - s, run.each)
            for group in groups:
                kept = tables.stage_bytes(run, s, group.ranks, "act_mem_floats") * run.micro_batch
                params = tables.stage_bytes(run, s, group.ranks, PARAMETERS)
                yield copies * params, in_flight * kept
