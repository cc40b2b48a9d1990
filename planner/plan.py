"""The plan: who runs which layers, in which system, and what that should cost. Data only."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ..profiles.errors import FileError, OrderError, PlanError, TaskWarning
from ..profiles.files import (
    MAX_SCHEDULED,
    Count,
    Factor,
    Predicted,
    ScheduleCount,
    Shown,
    TaggedFile,
    Tally,
    TotalBytes,
    read_file,
    save_file,
)
from ..profiles.plugins import GROUP, PACKAGE
from ..profiles.profile import Profile, ProfileReference, check_front_end, check_varying
from .cluster.cluster import Cluster
from .costs.layout import LinkMaker, StageTimes, make_pipeline
from .costs.memory import MemoryByKind, StageBytes
from .costs.recomputation import Recompute
from .costs.stage_costs import Transfer
from .costs.tied_parameters import Tied, check_tied, hint, misplaced
from .engine_costs import ENGINE_COSTS, Engine, on_engine
from .schedules.given import system_of
from .schedules.schedules import limit_ranges
from .systems.placement import check_placement, numbered_devices
from .systems.variants import Variant

if TYPE_CHECKING:
    import networkx as nx

    from .simulator.pipeline import Pipeline

FORMAT = "timeprest-plan/2"

Index = Annotated[int, Meta(ge=0)]


class PlanStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A stage. Edit `nodes` to move layers, then let `tp-plan check` say what that does."""

    nodes: Annotated[tuple[str, ...], Meta(min_length=1)]
    devices: Annotated[tuple[Index, ...], Meta(min_length=1)]
    """Positions in the cluster's list of devices. More than one: replicas, which share the work."""
    in_flight: ScheduleCount
    """Mini-batches that may be in flight here."""
    recompute: Recompute = False
    """Run the forward again before the backward; or these of the stage's layers (files.md)."""

    @property
    def recomputed(self) -> frozenset[str]:
        """Names of the layers that are computed again; none where the whole forward is."""
        return frozenset(self.recompute if isinstance(self.recompute, tuple) else ())


class PlanEdge(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tensor that crosses from one stage to another."""

    tensor: str
    source: Index
    target: Index
    bytes_per_micro_batch: TotalBytes
    needs_grad: bool


class StagePrediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a stage should cost.

    Times are for one micro-batch on its slowest device. In systems of whole mini-batches, replicas
    share each one: times are then for a replica's part.
    """

    forward_s: Predicted
    backward_s: Predicted
    """With the forward's work, where that is done again."""
    weight_s: Predicted = 0.0
    """How much of it is the weight part, in systems that split the backward."""
    update_s: Predicted
    all_reduce_s: Predicted = 0.0
    """Summing gradients over replicas, and over other stages' uses, before each update."""
    transfer_s: Predicted
    """Messages to and from this stage for one micro-batch: latency and wire."""
    parameter_bytes: TotalBytes
    memory_bytes: TotalBytes
    """On the replica that needs most."""
    memory: MemoryByKind
    micro_batches_kept: TotalBytes
    versions_held: Count
    version_difference: TotalBytes
    """Largest in the steady state."""
    delay: TotalBytes | None = None
    """Updates between a forward's weights and those that its gradient is applied to, the most in
    the steady state: the version difference, but where weights are stashed. None in older plans."""
    idle_share: Annotated[float, Meta(ge=0, le=1)]
    holds: StageBytes | None = None
    """What memory follows from as the schedule goes on; None in plans of before it was written."""
    accounted: MemoryByKind | None = None
    """What a run accounts for at its own peak, without scratch memory; None in older plans."""

    @property
    def accounted_memory(self) -> MemoryByKind:
        """What to hold a run's account against."""
        return self.accounted or msgspec.structs.replace(self.memory, workspace_bytes=0)


class TiePrediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters that several stages of a device use, and that it has once."""

    stages: tuple[Index, ...]
    """The first one updates them."""
    holds: StageBytes
    """Their optimizer state is among what that stage `holds`."""


class DevicePrediction(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """What a device that has several stages should hold and do; of replicas' devices, each."""

    stages: tuple[Index, ...]
    memory_bytes: TotalBytes
    """At the peak of its own sequence of operations: not the sum of its stages' peaks."""
    memory: MemoryByKind
    accounted: MemoryByKind
    """The peak of what a run accounts for (`StagePrediction.accounted`)."""
    idle_share: Annotated[float, Meta(ge=0, le=1)]
    ties: tuple[TiePrediction, ...] = ()
    """Not among what its stages `hold`."""

    @property
    def accounted_memory(self) -> MemoryByKind:
        """What to hold a run's account against."""
        return self.accounted


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the plan should cost, by simulation."""

    period_s: Predicted
    """Per mini-batch, in the steady state."""
    samples_per_s: Predicted
    speedup: Predicted
    """Over one device that runs whole mini-batches."""
    sequence_distance: Count | None = None
    """v, the largest in the steady state (`steady_state.sequence_distance`); None in older ones."""
    loading_s: Predicted | msgspec.UnsetType = msgspec.UNSET
    """To load a mini-batch: no period is shorter. Not there where the profile doesn't say it."""
    stages: tuple[StagePrediction, ...]
    devices: tuple[DevicePrediction, ...] = ()
    """Where devices have several stages, in the sequence in which stages come to them. Empty:
    each stage has devices of its own, and `stages` says it."""

    def loading(self, seconds: float) -> Prediction:
        """The same where a mini-batch takes so many seconds to load, by whoever loads ahead: a
        pipeline that is faster waits for samples, idle as it is then."""
        if seconds <= self.period_s:
            # One device would wait, too.
            speedup = max(self.speedup, seconds / self.period_s if self.period_s else 0.0)
            return msgspec.structs.replace(self, speedup=speedup, loading_s=seconds)
        share = self.period_s / seconds

        def waits(idle_share: float) -> float:
            return 1 - (1 - idle_share) * share

        replace = msgspec.structs.replace
        return replace(
            self,
            period_s=seconds,
            samples_per_s=self.samples_per_s * share,
            speedup=max(self.speedup * share, 1.0),
            stages=tuple(replace(s, idle_share=waits(s.idle_share)) for s in self.stages),
            devices=tuple(replace(d, idle_share=waits(d.idle_share)) for d in self.devices),
            loading_s=seconds,
        )

    @property
    def version_difference(self) -> int:
        """The largest of any stage."""
        return max(stage.version_difference for stage in self.stages)

    @property
    def delay(self) -> int:
        """The largest of any stage; 0 in older plans."""
        return max(stage.delay or 0 for stage in self.stages)

    @property
    def most_bytes(self) -> int:
        """On the fullest device."""
        return max(one.memory_bytes for one in self.devices or self.stages)

    @property
    def waits_for_samples(self) -> bool:
        """Whether it is loading that the period is made of."""
        return self.loading_s is not msgspec.UNSET and self.loading_s >= self.period_s

    def device_of(self, stage: int) -> StagePrediction | DevicePrediction:
        """What the device that a stage is on should hold and do."""
        return next((d for d in self.devices if stage in d.stages), self.stages[stage])

    def needs(
        self, stages: Sequence[PlanStage], cluster: Cluster
    ) -> Iterator[tuple[int, int, int]]:
        """Stage, the bytes its device needs, and what the smallest of its devices has for it; of
        those with limited memory."""
        for s, stage in enumerate(stages):
            smallest = cluster.tightest(stage.devices)
            limit = None if smallest is None else smallest.usable_bytes
            if limit is not None:
                yield s, self.device_of(s).memory_bytes, limit

    def ties_on(self, stages: Sequence[int]) -> tuple[TiePrediction, ...]:
        """Parameters that several of a device's stages use."""
        return next((d.ties for d in self.devices if d.stages == tuple(stages)), ())


class FastestPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the fastest plan found has, where another one was preferred to it (`--tolerance`). Its
    period is the solver's objective."""

    version_difference: TotalBytes
    """The largest of its stages."""
    memory_bytes: TotalBytes
    """On its fullest device."""
    given_for: Literal["staleness", "memory", "evenness", "stages"]
    """What of its period was given away for."""


class SolverReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the plan was found, and what is proven of it."""

    method: str
    objective_s: Predicted
    """The shortest period found; the plan's own is longer where there is a `fastest`."""
    bound_s: Predicted
    """No plan that was asked for has a shorter period."""
    gap: Predicted
    optimal: bool
    """True only when proven."""
    stopped: str | None = None
    """What ended the search early; None: nothing did."""
    plans_tried: Tally
    seconds: Predicted
    fastest: FastestPlan | msgspec.UnsetType = msgspec.UNSET
    """Not there where the plan is as fast as any found."""
    chosen: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """What was chosen where nothing was said, and how to have it otherwise. Not there where nothing
    was."""
    checksum: str | msgspec.UnsetType = msgspec.UNSET
    """Of the question and the answer (files.md). Not there in plans of before it was written."""

    def loading(self, seconds: float) -> SolverReport:
        """The same where no period is shorter than loading allows, whatever the cut: the best one
        is the best with it, too."""
        objective_s, bound_s = max(self.objective_s, seconds), max(self.bound_s, seconds)
        return msgspec.structs.replace(
            self,
            objective_s=objective_s,
            bound_s=bound_s,
            gap=max(objective_s / bound_s - 1, 0.0) if bound_s != self.bound_s else self.gap,
            optimal=self.optimal or objective_s <= seconds,
        )


class TargetPrediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How soon training by the plan should reach a study's target: the overhead of its delays times
    the samples of plain training, in its period. Intervals are of 95 %."""

    metric: str
    """What the target is a level of: "loss" (in training), "test loss", "accuracy"."""
    level: float
    overhead: Factor
    """Samples to the target over plain training's."""
    overhead_low: Factor | None
    """None, as `overhead_high`: nothing bounds it, or there is one seed."""
    overhead_high: Factor | None
    exact: bool
    """The study trained with these very delays; else the overhead is fitted to others."""
    samples: Predicted
    """That plain training needs."""
    time_s: Predicted
    bound_s: Predicted
    """No plan takes less whose overhead has a lower end; 0: not known."""
    gap: Predicted
    """Of the time over that bound; 1 without one."""
    shortest_period_s: Predicted
    """Of all plans that the study says anything of."""
    shortest_overhead: Factor
    """That plan's."""
    shortest_reaches: bool
    """Else it needs more: no training with such delays reached the target."""
    cure: str | msgspec.UnsetType = msgspec.UNSET
    """Settings that it is to be trained under, as the study's ``--cure`` has them."""
    rate: Factor | msgspec.UnsetType = msgspec.UNSET
    """The best learning rate of the training with these delays, or with the nearest ones. Unset, as
    those after it: in plans of before it was written."""
    rate_of: Literal["learning rate", "times the task's own"] | msgspec.UnsetType = msgspec.UNSET
    warmup: Tally | msgspec.UnsetType = msgspec.UNSET
    """Updates over which it rises."""
    trained_with: str | msgspec.UnsetType = msgspec.UNSET
    """Other options of ``tp-run`` that all of the study's trainings had."""

    @property
    def options(self) -> str:
        """Of ``tp-run``, that say these settings; and how many times the task's own learning rate
        is the best, where that isn't 1."""
        words = [] if self.cure is msgspec.UNSET else str(self.cure).split(",")
        own = self.rate_of == "times the task's own"
        if self.rate is not msgspec.UNSET and not own:
            words.append(f"lr={self.rate:g}")
        if self.warmup is not msgspec.UNSET and self.warmup:
            words.append(f"warmup={self.warmup}")
        found = [] if self.trained_with is msgspec.UNSET else [str(self.trained_with)]
        found += [f"--{word.replace('=', ' ')}" for word in words]
        if self.rate is not msgspec.UNSET and own and self.rate != 1:
            found.append(f"({self.rate:g} times the task's own learning rate)")
        return " ".join(found)

    def seconds(self, overhead: float | None) -> float | None:
        """The time with another overhead."""
        return None if overhead is None else self.time_s * overhead / self.overhead


def _without_cores(plan: Any) -> None:
    """In the first format, devices could take turns on the cores of their machine."""
    cluster = plan.get("cluster")
    cores = cluster.pop("cores", None) if isinstance(cluster, dict) else None
    if cores is not None:
        raise FileError(
            f"cluster.cores: its {cores} cores are shared by more devices, which isn't planned any "
            "more; plan several stages for a device instead: tp-plan solve --stages-per-device"
        )


class Plan(TaggedFile, Shown, frozen=True, kw_only=True, tag=FORMAT):
    """A plan that tp-run can execute."""

    older: ClassVar[dict[str, Callable[[Any], None]]] = {"timeprest-plan/1": _without_cores}

    variant: str
    mini_batch: Count
    micro_batches: Count
    profile: ProfileReference
    cluster: Cluster
    optimizer_state_factor: Factor
    """TotalBytes of optimizer state per byte of parameters."""
    matrix_state_factor: Factor | msgspec.UnsetType = msgspec.UNSET
    """The same of matrices of hidden layers, where it is another, as Muon's is."""
    update_every: ScheduleCount = 1
    """Mini-batches per update: their gradients are averaged. Fewer updates, smaller differences."""
    tied: Tied = "together"
    """"split": layers that share parameters may be on several devices, each with a copy."""
    order: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """What each device runs, where a user gave that (`systems.orders`); else the system says it."""
    plugin: str | msgspec.UnsetType = msgspec.UNSET
    """Where the system is from, if not from the table: a file, or "package NAME"."""
    plugin_checksum: str | msgspec.UnsetType = msgspec.UNSET
    """Of that file's content: when the plan was made, and in a run's directory, when it began."""
    stages: Annotated[tuple[PlanStage, ...], Meta(min_length=1)]
    edges: tuple[PlanEdge, ...]
    engine: Engine | msgspec.UnsetType = msgspec.UNSET
    """Whose run is predicted; tp-run's where it isn't there (`engine_runs.run_by`)."""
    predicted: Prediction
    to_target: TargetPrediction | msgspec.UnsetType = msgspec.UNSET
    """Only where it was planned by a study."""
    solver: SolverReport

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file. Raises FileError or PlanError naming the file and field."""
        return read_plan(path)

    def save(self, path: str | Path) -> None:
        """Write a plan file. Raises FileError, also where another file would be lost."""
        save_file(path, self)

    def to_networkx(self) -> nx.DiGraph:
        """The stages and what goes between them, as a `networkx.DiGraph` (docs/networkx.md).

        Nodes are the stages' numbers; the fields of `PlanStage` and of `StagePrediction` are
        attributes. An edge has `tensors`, the `PlanEdge` of each tensor that goes there, and
        `bytes_per_micro_batch`, their sum. The graph itself has the attribute `plan`, this one.
        """
        import networkx as nx

        graph = nx.DiGraph(plan=self)
        for s, stage in enumerate(self.stages):
            predicted = msgspec.structs.asdict(self.predicted.stages[s])
            graph.add_node(s, **msgspec.structs.asdict(stage), **predicted)
        for edge in self.edges:
            graph.add_edge(edge.source, edge.target)
            ends = graph.edges[edge.source, edge.target]
            ends.setdefault("tensors", []).append(edge)
            ends["bytes_per_micro_batch"] = sum(e.bytes_per_micro_batch for e in ends["tensors"])
        return graph

    @property
    def title(self) -> str:
        """Its system, and whose run of it is predicted."""
        if self.engine is msgspec.UNSET:
            return self.variant
        return f"{self.variant} in {ENGINE_COSTS[self.engine].title}"

    @property
    def micro_batch(self) -> int:
        """Samples in a micro-batch; in the largest, where they don't divide the mini-batch."""
        return -(-self.mini_batch // self.micro_batches)

    @property
    def system(self) -> Variant:
        """What the training system does, in the plan's own order if it has one.

        Raises PlanError where there is none of this name, or for a bad order.
        """
        return system_of(self.variant, () if self.order is msgspec.UNSET else self.order)

    @property
    def placement(self) -> tuple[int, ...]:
        """Per stage, the number of its device; empty where each has one of its own."""
        return numbered_devices([stage.devices for stage in self.stages])

    @property
    def workers(self) -> int:
        """How many there are: one for each device that stages are on."""
        return len({device for stage in self.stages for device in stage.devices})


def read_plan(path: str | Path) -> Plan:
    """Read and check a plan file. Raises FileError or PlanError naming the file and field."""
    return check_plan(read_file(path, Plan), str(path))


def check_plan(plan: Plan, where: str = "plan") -> Plan:
    """Return the plan if it is consistent in itself; a schedule can be made from it.

    Raises:
        PlanError: an unknown system, a number of micro-batches, replicas or in-flight limits
            that it can't have, a device twice or none, or edges that go backwards.
    """

    def fail(what: str) -> PlanError:
        return PlanError(f"{where}: {what}")

    if len(plan.predicted.stages) != len(plan.stages):
        raise fail(
            f"predicted.stages: {len(plan.predicted.stages)} entries for {len(plan.stages)} "
            "stages; after adding or removing a stage, solve again"
        )
    if plan.engine is not msgspec.UNSET:
        title = ENGINE_COSTS[plan.engine].title
        raise fail(f"engine: it says what a run in {title} costs; give the plan it was made of")
    names = [name for stage in plan.stages for name in stage.nodes]
    if len(set(names)) < len(names):
        twice = min(name for name, count in Counter(names).items() if count > 1)
        raise fail(f"stages: layer {twice!r} stands in two places")
    _check_devices(plan, fail)
    for edge in plan.edges:
        if not edge.source < edge.target < len(plan.stages):
            raise fail(
                f"edges: {edge.tensor!r} goes from stage {edge.source} to {edge.target}; "
                "tensors go to later stages only"
            )
    try:
        variant = plan.system
    except OrderError as error:
        raise fail(str(error)) from None
    except PlanError as error:
        if plan.plugin is msgspec.UNSET:
            raise fail(f"variant: {error}") from None
        raise fail(_lacking(plan.variant, plan.plugin)) from None
    _look_at_plugin(plan, variant, where)  # first: its system's limits may be others since
    try:
        check_stages(variant, plan.mini_batch, plan.micro_batches, plan.stages)
        check_tied(variant, plan.tied)
    except PlanError as error:
        raise fail(str(error)) from None
    check_front_end(plan.profile, f"{where}: profile")
    check_varying(plan.profile.varying, f"{where}: profile")
    return plan


_told: set[tuple[bytes, str]] = set()
"""Plans that a warning was given of, whatever names they have, with what their plugin is now."""


def _look_at_plugin(plan: Plan, variant: Variant, where: str) -> None:
    """Warn, once of a plan in a process, where its plugin isn't what it was."""
    there, made_with = with_plugin_at_hand(plan).plugin_checksum, plan.plugin_checksum
    if msgspec.UNSET in (there, made_with) or there == made_with:
        return
    if (told := (msgspec.json.encode(plan), str(there))) not in _told:
        _told.add(told)
        line = (
            f"{where}: the plugin {plan.plugin} has changed since this was made: {variant.name} "
            "may be another system now"
        )
        warnings.warn(line, TaskWarning, stacklevel=3)


def with_plugin_at_hand(plan: Plan) -> Plan:
    """The plan as made with the plugin that is loaded, if its system is from one."""
    outside = plan.system.outside
    checksum = outside.checksum if outside is not None and outside.checksum else msgspec.UNSET
    return msgspec.structs.replace(plan, plugin_checksum=checksum)


def same_plan(plan: Plan, other: Plan) -> bool:
    """Whether they are the same, whatever has become of the plugin."""
    unset = {"plugin_checksum": msgspec.UNSET}
    return msgspec.structs.replace(plan, **unset) == msgspec.structs.replace(other, **unset)


def _lacking(variant: str, plugin: str) -> str:
    """What to do where a plan's plugin isn't at hand."""
    name = plugin.removeprefix(PACKAGE)
    if name != plugin:
        return f"variant: {variant!r} is of an installed package's {GROUP} {name!r}; install it"
    return f"variant: {variant!r} is of the plugin {plugin}; give --plugin {plugin}"


def check_stages(
    variant: Variant, mini_batch: int, micro_batches: int, stages: Sequence[PlanStage]
) -> None:
    """Check that the system can have these stages with so many samples and micro-batches.

    Raises:
        PlanError: micro-batches that the system can't have, replicas that don't share the work
            evenly, or limits that rise along the pipeline or that the system doesn't have.
    """
    _check_order(variant, micro_batches, stages)
    if micro_batches > MAX_SCHEDULED:
        raise PlanError(f"micro_batches: {micro_batches} are more than {MAX_SCHEDULED}")
    if micro_batches > mini_batch:
        raise PlanError(
            f"micro_batches: {micro_batches} are more than the mini-batch's {mini_batch} samples"
        )
    if variant.whole_mini_batches and micro_batches != 1:
        raise PlanError(f"micro_batches: {variant.name} runs whole mini-batches; set it to 1")
    placement = numbered_devices([stage.devices for stage in stages])
    check_placement(variant, placement, len(stages))
    least = variant.least_micro_batches(len(stages))
    if micro_batches < least:
        raise PlanError(
            f"micro_batches: {variant.name} needs one for each of the {least} stages at least, "
            f"not {micro_batches}"
        )
    for s, stage in enumerate(stages):
        if stage.recompute and variant.recompute_refusal:
            raise PlanError(f"stages[{s}].recompute: {variant.recompute_refusal}")
        for name in sorted(stage.recomputed - set(stage.nodes)):
            raise PlanError(f"stages[{s}].recompute: stage {s} has no layer {name!r}")
    dealt = ("mini_batch", mini_batch) if variant.whole_mini_batches else None
    what, parts = dealt or ("micro_batches", micro_batches)
    for s, stage in enumerate(stages):
        if parts % len(stage.devices):
            raise PlanError(
                f"stages[{s}].devices: {len(stage.devices)} replicas don't divide {what} {parts}"
            )
    limits = [stage.in_flight for stage in stages]
    ranges = limit_ranges(variant, len(limits), several=bool(placement))
    for s, (limit, (least, most)) in enumerate(zip(limits, ranges, strict=True)):
        if s and limit > limits[s - 1] and variant.order is None:
            raise PlanError(
                f"stages[{s}].in_flight: {limit} is more than stage {s - 1}'s {limits[s - 1]}; "
                "limits must not rise along the pipeline"
            )
        if least == most != limit:
            on = " on the last stage" if s == len(limits) - 1 and not variant.flushes else ""
            raise PlanError(f"stages[{s}].in_flight: must be {most}{on} in {variant.name}")


def _check_order(variant: Variant, micro_batches: int, stages: Sequence[PlanStage]) -> None:
    """Check that an order, if one is given, is of these stages."""
    order = variant.order
    if order is None:
        return
    if len(stages) != order.stages:
        raise PlanError(f"order: has {order.stages} stages, the plan {len(stages)}")
    if micro_batches != order.micro_batches:
        raise PlanError(
            f"micro_batches: the order has {order.micro_batches} in a mini-batch, not "
            f"{micro_batches}"
        )
    if numbered_devices([stage.devices for stage in stages]) != order.placement:
        raise PlanError("order: its lines have other stages than the plan's devices")
    for s, stage in enumerate(stages):
        if len(stage.devices) > 1:
            raise PlanError(f"stages[{s}].devices: a stage of a given order has no replicas")


def _check_devices(plan: Plan, fail: Callable[[str], PlanError]) -> None:
    taken: dict[int, int] = {}
    for s, stage in enumerate(plan.stages):
        where = f"stages[{s}].devices"
        for device in stage.devices:
            if device >= len(plan.cluster.devices):
                raise fail(
                    f"{where}: {device} isn't one of the {len(plan.cluster.devices)} devices "
                    "(0 is the first)"
                )
            if taken.get(device) == s:
                raise fail(f"{where}: names device {device} twice")
            other = taken.setdefault(device, s)
            if plan.stages[other].devices != stage.devices:
                raise fail(
                    f"{where}: device {device} runs stage {other}, too, and that one has devices "
                    f"{list(plan.stages[other].devices)}; stages that share a device must share "
                    "all their devices, in the same sequence"
                )


def check_against_profile(plan: Plan, profile: Profile, where: str = "plan") -> None:
    """Check that the plan is one for this profile, with each layer on exactly one stage.

    Raises PlanError.
    """
    if plan.profile.fingerprint != profile.fingerprint:
        raise PlanError(
            f"{where}: was made for another model ({plan.profile.target}, fingerprint "
            f"{plan.profile.fingerprint}) than {profile.target} (fingerprint "
            f"{profile.fingerprint}); profile and solve again"
        )
    check_cut(
        [stage.nodes for stage in plan.stages],
        [layer.name for layer in profile.layers],
        [(edge.producer, edge.consumer) for edge in profile.edges],
        where,
    )
    found = misplaced(
        profile,
        [stage.nodes for stage in plan.stages],
        [stage.devices for stage in plan.stages],
        plan.tied,
    )
    if found is not None:
        group, place = found
        raise PlanError(
            f"{where}: layers {', '.join(map(repr, group))} must be on {place}: they share "
            f"parameters, or one changes in place what the others use{hint(profile, group)}"
        )


def check_cut(
    stages: Sequence[Sequence[str]],
    layers: Sequence[str],
    edges: Sequence[tuple[str, str]],
    where: str = "plan",
) -> None:
    """Check that every layer stands on one stage and no edge goes backwards.

    Raises PlanError naming the layer.
    """
    stage_of = {name: s for s, nodes in enumerate(stages) for name in nodes}
    known = set(layers)
    for s, nodes in enumerate(stages):
        for name in nodes:
            if name not in known:
                raise PlanError(f"{where}: stages[{s}].nodes: the model has no layer {name!r}")
    for name in layers:
        if name not in stage_of:
            raise PlanError(f"{where}: layer {name!r} stands on no stage")
    for producer, consumer in edges:
        if consumer in stage_of and stage_of[producer] > stage_of[consumer]:
            raise PlanError(
                f"{where}: layer {consumer!r} on stage {stage_of[consumer]} needs "
                f"{producer!r} of the later stage {stage_of[producer]}"
            )


def pipeline_of(plan: Plan) -> Pipeline:
    """What the plan's schedules follow from: its own stage times, edges, devices and limits, and
    the engine whose run is predicted."""
    transfers = [
        Transfer(e.tensor, e.source, e.target, e.bytes_per_micro_batch, e.needs_grad)
        for e in plan.edges
    ]
    pipeline = make_pipeline(
        LinkMaker(plan.system, plan.cluster),
        plan.micro_batches,
        [
            StageTimes(p.forward_s, p.backward_s, p.update_s, p.all_reduce_s, p.weight_s)
            for p in plan.predicted.stages
        ],
        transfers,
        [stage.devices for stage in plan.stages],
        [stage.in_flight for stage in plan.stages],
        plan.update_every,
    )
    if plan.engine is msgspec.UNSET:
        return pipeline
    return on_engine(pipeline, ENGINE_COSTS[plan.engine])
