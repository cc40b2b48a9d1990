"""A request becomes a question, and the branches of a search that hasn't begun."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from ...profiles.errors import PlanError
from ...profiles.profile import Profile
from ..cluster.cluster import Cluster
from ..cluster.headroom import Headroom, usual_headroom
from ..costs.layer_graph import held_together
from ..costs.tied_parameters import Tied, check_tied
from ..evaluate import Evaluation
from ..partition.solve import SOLVERS, source_for
from ..question import Question
from ..schedules.schedules import StalenessBounds
from ..systems.variants import variant_named
from .choices import RECOMPUTE, Branch, Freedom, check_staleness, micro_batch_counts, stages_asked
from .device_sequences import SEQUENCES
from .relaxed.relaxation import Relaxation
from .state import EFFORT, SOON_S, Budget, Progress, SearchState, is_late


@dataclass(frozen=True)
class SearchRequest:
    """What may be chosen, and what may be spent on choosing.

    Attributes:
        micro_batches: N; None: every divisor of the mini-batch whose size the profile measured.
        stages: S; None: every count up to the number of devices.
        replicas: stages may take several devices; none that share theirs with other stages.
        stages_per_device: v; None: any number, more only where they pay (`LEAST_GAIN`).
            Systems that place their stages themselves have 2 at least, or one stage in all.
        placement: one of `PLACEMENTS`; "auto": any that so many stages can have.
        sequence: one of `SEQUENCES`; only for plans with a stage for each device.
        recompute: "off", "on", "selective" or "auto": stages compute none of their activations
            again, all, those of some layers, or whatever is best.
        tolerance: share of the shortest period that may be given away for what else is minded
            (`answer.preference`).
        run_ahead, max_in_flight, max_difference, max_delay: as of `schedules.StalenessBounds`.
        pins: (layer's name, stage), 0 the first.
        solver: one of SOLVERS; "auto": dynamic programming where the downsets can be listed,
            else the ILP.
        time_limit_s: the search ends then, with the best plan so far; None: no limit. What takes
            `SOON_S` may still follow: a first plan, or the last touches to the best one.
        effort: simulated operations that it may spend.
        explains: where nothing fits, what would do is looked for.
    """

    micro_batches: int | None = None
    stages: int | None = None
    replicas: bool = False
    stages_per_device: int | None = 1
    placement: str = "auto"
    sequence: str = "listed"
    recompute: str = "off"
    tolerance: float = 0.0
    run_ahead: str = "paper"
    max_in_flight: int | None = None
    max_difference: int | None = None
    max_delay: int | None = None
    pins: tuple[tuple[str, int], ...] = ()
    solver: str = "auto"
    time_limit_s: float | None = 60.0
    effort: int = EFFORT
    explains: bool = True

    @property
    def freedom(self) -> Freedom:
        """What the search may choose."""
        staleness = StalenessBounds(
            self.run_ahead, self.max_in_flight, self.max_difference, self.max_delay
        )
        return Freedom(self.replicas, self.recompute, staleness)


def read_asked(
    profile: Profile, cluster: Cluster, variant: str, asked: Mapping[str, Any]
) -> tuple[Question, SearchRequest]:
    """What `solve` plans, and what it may choose. Raises as `question_for`; UserError for a
    headroom that is all of a device's memory.

    Args:
        asked: fields of `SearchRequest`, what `question_for` takes besides, and `headroom`: what
            plans leave free of each device's memory, where the cluster doesn't say it; None: what
            is usual of the profile's device. The plan's cluster has it.
    """
    own = {field.name for field in fields(SearchRequest)}
    rest = {name: value for name, value in asked.items() if name not in own}
    request = SearchRequest(**{name: asked[name] for name in own & asked.keys()})
    headroom: Headroom | None = rest.pop("headroom", None)
    cluster = cluster.with_headroom(usual_headroom(profile) if headroom is None else headroom)
    return question_for(profile, cluster, variant, **rest), request


def question_for(
    profile: Profile,
    cluster: Cluster,
    variant: str,
    *,
    mini_batch: int | None = None,
    optimizer_state_factor: float | None = None,
    matrix_state_factor: float | None = None,
    update_every: int = 1,
    tied: Tied = "together",
) -> Question:
    """The question that `solve` answers. Raises PlanError as that.

    Args:
        mini_batch: samples per update; the profile's by default.
        optimizer_state_factor: bytes of optimizer state per byte of parameters; the
            profile's by default.
        matrix_state_factor: of those that are matrices of hidden layers; the same by default.
        update_every: mini-batches per update.
        tied: "split": layers that share parameters may be on several devices, each with a copy;
            for systems that flush.
    """
    factor = (
        profile.optimizer.state_bytes_per_parameter_byte
        if optimizer_state_factor is None
        else optimizer_state_factor
    )
    if update_every < 1:
        raise PlanError(f"--update-every {update_every}: give at least 1")
    check_tied(variant_named(variant), tied)
    mini_batch = mini_batch or profile.batch_size
    if matrix_state_factor is not None and not any(la.matrix_bytes for la in profile.layers):
        raise PlanError(
            "--optimizer-state muon: the profile names no matrices of hidden layers, as one of "
            "before they were looked for; profile again, or give a number"
        )
    return Question.of(
        profile,
        cluster,
        variant,
        mini_batch,
        factor,
        update_every,
        tied,
        matrix_state_factor,
    )


def explore(
    question: Question,
    request: SearchRequest,
    progress: Progress,
    seen: Callable[[Evaluation], None] | None = None,
) -> SearchState:
    """The search that answers a request; not begun yet. Raises PlanError."""
    check_request(question, request)
    deadline = deadline_of(request)
    counts = micro_batch_counts(question, request.micro_batches)
    relaxation = Relaxation(question, request.freedom)
    # Of a small graph there is always time to list the downsets: without them plans are found late.
    listed = None if deadline is None else max(deadline, time.monotonic() + SOON_S / 2)
    source = source_for(relaxation.problem(Branch(counts[0])), request.solver, listed)
    asked = stages_asked(
        question.system, request.stages_per_device, request.placement, request.stages
    )
    devices, wanted = len(question.cluster.devices), 1 if asked.one_stage else request.stages
    most, stage_counts = 0, list[int | None]()
    pins: tuple[tuple[int, int], ...] = ()
    # More stages than devices may still be several on each.
    if asked.straight and not (asked.per_device and (wanted or 1) > devices):
        most = _most_stages(question, relaxation, wanted)
    # And so may a stage be that a layer is pinned to.
    pinned = max((stage for _, stage in request.pins), default=0)
    if most and (pinned < most or not asked.per_device):
        pins = pins_of(relaxation, request.pins, most)
        stage_counts = [wanted]
        if pins and wanted is None:
            # Stages are counted from the input side; only with their number known does the
            # program, which runs from the other, know which one it is at.
            stage_counts = [*range(max(stage for _, stage in pins) + 1, most + 1)]
    branches = [
        Branch(n, s, pins)
        for n, s in product(counts, stage_counts)
        if s is None or relaxation.allows(s, n)
    ]
    if stage_counts and not branches and not asked.per_device:
        raise _too_many_stages(relaxation, stage_counts[0] or 1, counts)
    return SearchState(
        relaxation=relaxation,
        source=source,
        branches=branches,
        most_stages=most or devices,
        budget=Budget(request.effort, deadline, hurried=is_late(listed)),
        progress=progress,
        seen=seen or (lambda _: None),
    )


def _too_many_stages(relaxation: Relaxation, stages: int, counts: Sequence[int]) -> PlanError:
    """That the system runs so many with none of these micro-batch counts, and what to give."""
    variant, n = relaxation.variant, counts[-1]
    fewer = max(s for s in range(1, stages) if relaxation.allows(s, n))
    least = variant.least_micro_batches(stages)
    of = f" of a --mini-batch of {least}" if least > relaxation.question.mini_batch else ""
    return PlanError(
        f"{stages} stages: {variant.name} needs a micro-batch for each at least, and there are {n} "
        f"at the most; give --stages {fewer} or fewer, or --micro-batches {least}{of}"
    )


def check_request(question: Question, request: SearchRequest) -> None:
    """Raise PlanError for what can't be asked for of this question."""
    if not 0 <= request.tolerance < 1:
        raise PlanError(f"--tolerance {request.tolerance:.0%}: give a share from 0% to below 100%")
    if request.recompute not in RECOMPUTE:
        raise PlanError(f"--recompute {request.recompute}: give one of {', '.join(RECOMPUTE)}")
    refusal = question.system.recompute_refusal
    if request.recompute in ("on", "selective") and refusal:
        raise PlanError(f"--recompute {request.recompute}: {refusal}")
    check_staleness(question, request.freedom.staleness, request.stages)
    if request.solver not in SOLVERS:
        raise PlanError(f"--solver {request.solver}: give one of {', '.join(SOLVERS)}")
    if request.sequence not in SEQUENCES:
        raise PlanError(f"--sequence {request.sequence}: give one of {', '.join(SEQUENCES)}")


def deadline_of(request: SearchRequest) -> float | None:
    """When a search that begins now ends, by `time.monotonic`, in s; None: there is no limit."""
    return None if request.time_limit_s is None else time.monotonic() + request.time_limit_s


def _most_stages(question: Question, relaxation: Relaxation, asked: int | None) -> int:
    devices, layers = len(question.cluster.devices), len(question.profile.layers)
    tied = sum(group.bit_count() - 1 for group in relaxation.graph.together)
    most = min(devices, max(layers - tied, 1))
    if asked is None:
        return most
    if asked > devices:
        raise PlanError(f"--stages {asked}: the cluster has only {devices} devices")
    if asked > relaxation.graph.most_stages:
        tie = held_together(question.profile, relaxation.variant, question.tied)
        most = relaxation.graph.most_stages
        noun = "stage" if most == 1 else "stages"
        raise PlanError(
            f"--stages {asked}: the model can be cut into {most} {noun} at most ({layers} layers)"
            + (f": {tie}" if tie else "")
        )
    return asked


def pins_of(
    relaxation: Relaxation, asked: Sequence[tuple[str, int]], most_stages: int
) -> tuple[tuple[int, int], ...]:
    """(layer's position, stage) of layers that are pinned by their names. Raises PlanError."""
    position = relaxation.graph.position
    for name, stage in asked:
        if name not in position:
            like = difflib.get_close_matches(name, position) or [*position][:3]
            raise PlanError(
                f"--pin {name}: the profile has no layer of this name; it has "
                f"{', '.join(like)}{', …' * (len(position) > len(like))}"
            )
        if not 0 <= stage < most_stages:
            raise PlanError(
                f"--pin {name}={stage}: there are {most_stages} stages at most, and 0 is the first"
            )
    return tuple((position[name], stage) for name, stage in asked)
