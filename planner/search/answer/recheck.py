"""Checking a plan that people may have edited: everything predicted is made anew."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

import msgspec

from ....profiles.errors import PlanError
from ....profiles.profile import Profile
from ....profiles.units import format_bytes, format_seconds
from ...evaluate import evaluate, gap_between, make_plan
from ...partition.problem import SAME
from ...plan import Plan, PlanEdge, PlanStage, SolverReport, check_against_profile
from ...question import Question
from ...recordings.recording import stages_text


@dataclass(frozen=True)
class Recheck:
    """Attributes:
    plan: with edges and predictions made anew.
    changes: what differs from the plan as it was given, for people.
    over: what breaks a memory limit, or None.
    """

    plan: Plan
    changes: tuple[str, ...]
    over: str | None


def question_of(plan: Plan, profile: Profile) -> Question:
    """What a plan is an answer to, by the profile that it was made from."""
    own = plan.matrix_state_factor
    return Question.of(
        profile,
        plan.cluster,
        plan.variant,
        plan.mini_batch,
        plan.optimizer_state_factor,
        plan.update_every,
        plan.tied,
        None if own is msgspec.UNSET else own,
        () if plan.order is msgspec.UNSET else plan.order,
    )


_POINT_ZERO = re.compile(rb"\.0(?=[,\]}])")


_PROVEN_FOR = 32
"""So many digits of a checksum are of what a bound was proven for; the rest is of the answer."""
_STAGES = slice(_PROVEN_FOR, _PROVEN_FOR + 16)
_FOUND = slice(_STAGES.stop, _STAGES.stop + 16)
_ANSWER = slice(0, _FOUND.stop)
_MADE = slice(_FOUND.stop, None)


def checksum_of(
    question: Question, stages: Sequence[PlanStage], micro_batches: int, report: SolverReport
) -> str:
    """Of a question and its answer, 64 hex digits: 16 of what the plan says of the question, with
    its micro-batches; 16 of the profile and a plugin; 16 of the stages; 16 of what is proven.

    What was left open isn't among it: a bound is of plans that were asked for.
    """
    outside = question.system.outside
    others = _checksum(question.profile, outside.checksum if outside is not None else "")
    return _said(question, micro_batches) + others + _checksum(stages) + _found(report)


def _found(report: SolverReport) -> str:
    """The part of what the solver proved, and how far it came."""
    return _checksum(report.bound_s, report.gap, report.optimal, report.stopped)


def _made(plan: Plan) -> str:
    """The part of what follows from profile and stages, and is made anew."""
    return _checksum(plan.profile, plan.edges, plan.predicted, plan.solver.objective_s)


def _signature(report: SolverReport, part: slice) -> str:
    """A part of its checksum; nothing in older plans, which lack it."""
    return report.checksum[part] if isinstance(report.checksum, str) else ""


def _found_was_edited(report: SolverReport) -> bool:
    """Whether what is proven isn't what was written."""
    return _signature(report, _FOUND) not in ("", _found(report))


def _said(of: Question | Plan, micro_batches: int) -> str:
    """The part of what a plan says of its question."""
    own, order = of.matrix_state_factor, of.order
    return _checksum(
        of.cluster,
        of.variant,
        of.mini_batch,
        of.update_every,
        of.tied,
        of.optimizer_state_factor,
        None if own is msgspec.UNSET else own,
        () if order is msgspec.UNSET else order,
        micro_batches,
    )


def signed(plan: Plan, question: Question) -> Plan:
    """A plan with its checksum."""
    checksum = checksum_of(question, plan.stages, plan.micro_batches, plan.solver) + _made(plan)
    solver = msgspec.structs.replace(plan.solver, checksum=checksum)
    return msgspec.structs.replace(plan, solver=solver)


def was_edited(plan: Plan) -> bool:
    """Whether a plan contradicts itself: it was edited, and not checked since.

    Another profile isn't seen.
    """
    predicted, solver = plan.predicted, plan.solver
    samples = predicted.samples_per_s * predicted.period_s
    if samples and abs(samples - plan.mini_batch) > 1e-6 * plan.mini_batch:
        return True
    on_devices = {
        tuple(t for t, other in enumerate(plan.stages) if other.devices == stage.devices)
        for stage in plan.stages
    }
    shared = on_devices if plan.placement else set()
    if {tuple(sorted(device.stages)) for device in predicted.devices} != shared:
        return True
    if solver.checksum is msgspec.UNSET:
        return False
    said, stages = _said(plan, plan.micro_batches), _checksum(plan.stages)
    same = solver.checksum.startswith(said) and solver.checksum[_STAGES] == stages
    made = _signature(solver, _MADE) in ("", _made(plan))
    return not (same and made) or _found_was_edited(solver)


def _checksum(*parts: object) -> str:
    """The first 16 hex digits of the SHA-256 of parts as files have them."""
    # A file that was read has 2.0 where 2 was given.
    text = _POINT_ZERO.sub(b"", msgspec.json.encode(parts))
    return hashlib.sha256(text).hexdigest()[:16]


def recheck(plan: Plan, profile: Profile, where: str = "plan") -> Recheck:
    """Evaluate the plan's own cut, micro-batches and limits from the profile alone.

    The solver's bound stays where it was proven for the same question, by the plan's checksum of
    that; a plan whose period is now above it isn't called optimal any more, and for one whose
    period is below it, it wasn't proven: then nothing is known.

    Raises PlanError when the plan contradicts the profile.
    """
    check_against_profile(plan, profile, where)
    question = question_of(plan, profile)
    try:
        found = evaluate(question, plan.stages, plan.micro_batches)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    period_s = found.prediction.period_s
    if profile.loading_s_per_sample is not msgspec.UNSET:
        period_s = max(period_s, profile.loading_s_per_sample * plan.mini_batch)
    checksum = checksum_of(question, plan.stages, plan.micro_batches, plan.solver)
    stays = _same_question(plan.solver.checksum, checksum) and not _found_was_edited(plan.solver)
    stays = stays and plan.solver.bound_s <= period_s * SAME
    unedited = _signature(plan.solver, _ANSWER) == checksum
    if stays and plan.solver.fastest is not msgspec.UNSET and unedited:
        # The plan that was preferred to the fastest one, which the solver speaks of.
        report = plan.solver
    else:
        bound_s = plan.solver.bound_s if stays else 0.0
        optimal = plan.solver.optimal and period_s <= bound_s * SAME
        report = msgspec.structs.replace(
            plan.solver,
            objective_s=period_s,
            bound_s=bound_s,
            gap=0.0 if optimal else gap_between(period_s, bound_s),
            optimal=optimal,
            fastest=msgspec.UNSET,
        )
    fresh = signed(make_plan(question, found, report), question)
    answers = {_signature(each.solver, _ANSWER) for each in (fresh, plan)}
    if len(answers) == 1 and period_s == plan.predicted.period_s:
        # By the same study as before.
        fresh = msgspec.structs.replace(fresh, to_target=plan.to_target)
    changes = _changes(plan, fresh)
    if plan.to_target is not msgspec.UNSET and fresh.to_target is msgspec.UNSET:
        changes.append(
            "the time to the study's target is left out: it was the other plan's; tp-plan solve "
            "--study reckons it"
        )
    over = {}
    for s, count in found.over_limit(plan.cluster):
        stages = _sharing(fresh, s)
        over[stages] = (
            f"{stages_text(stages)} {'is' if len(stages) == 1 else 'are'} {format_bytes(count)} "
            f"over the limit of {'its' if len(stages) == 1 else 'their'} device "
            f"{_limit_text(plan, s)} ({count} bytes)"
        )
    return Recheck(fresh, tuple(changes), "; ".join(over.values()) or None)


def _sharing(plan: Plan, s: int) -> tuple[int, ...]:
    """The stages on a stage's device."""
    return next((d.stages for d in plan.predicted.devices if s in d.stages), (s,))


def _limit_text(plan: Plan, s: int) -> str:
    """Name of the stage's device with the least memory, and what of it has to stay free."""
    device = plan.cluster.tightest(plan.stages[s].devices)
    assert device is not None
    free = f", {format_bytes(device.free_bytes)} kept free" if device.free_bytes else ""
    return f"{device.name!r}{free}"


def _changes(old: Plan, new: Plan) -> list[str]:
    lines = []
    if abs(old.predicted.period_s - new.predicted.period_s) > 1e-9 * new.predicted.period_s:
        before, after = (format_seconds(p.predicted.period_s) for p in (old, new))
        lines.append(f"period {before} → {after}")
    for s, (a, b) in enumerate(zip(old.predicted.stages, new.predicted.stages, strict=True)):
        if a.memory_bytes != b.memory_bytes:
            before, after = format_bytes(a.memory_bytes), format_bytes(b.memory_bytes)
            lines.append(f"stage {s} memory {before} → {after}")
        if a.version_difference != b.version_difference:
            lines.append(
                f"stage {s} version difference {a.version_difference} → {b.version_difference}"
            )
    known = {device.stages: device.memory_bytes for device in old.predicted.devices}
    for device in new.predicted.devices:
        was_bytes = known.get(device.stages)
        if was_bytes != device.memory_bytes and len(device.stages) > 1:
            first = "" if was_bytes is None else f"{format_bytes(was_bytes)} → "
            lines.append(
                f"{stages_text(device.stages)} on one device, its memory "
                f"{first}{format_bytes(device.memory_bytes)}"
            )
    if old.predicted.sequence_distance != new.predicted.sequence_distance:
        was, now = (p.predicted.sequence_distance for p in (old, new))
        lines.append(f"v {was or 'not counted'} → {now}")
    if old.edges != new.edges:
        before, after = (", ".join(sorted({e.tensor for e in p.edges})) for p in (old, new))
        if before == after:
            before, after = _apart(old.edges, new.edges), _apart(new.edges, old.edges)
        lines.append(f"edges {before or 'none'} → {after or 'none'}")
    if new.solver.bound_s < old.solver.bound_s:
        before, after = (format_seconds(p.solver.bound_s) for p in (old, new))
        after = after if new.solver.bound_s else "none"
        lines.append(f"lower bound {before} → {after}: {_not_proven(old, new)}")
    elif _found_was_edited(old.solver):
        lines.append(f"solver: {_not_proven(old, new)}")
    parts = ({"profile": plan.profile, "predicted": plan.predicted} for plan in (old, new))
    edited = list(_edited_fields(*map(msgspec.to_builtins, parts)))
    # Where something else has changed, all figures have with it.
    return lines + [line for line in edited if not lines or line.startswith("profile")]


def _edited_fields(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Fields that say something else than before; of predictions, not what older plans lack."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _edited_fields(old.get(key), new.get(key), f"{place}.{key}".lstrip("."))
    elif isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        for k, each in enumerate(old):
            yield from _edited_fields(each, new[k], f"{place}[{k}]")
    elif isinstance(old, float) and isinstance(new, float) and isclose(old, new):
        return
    elif old != new and not (old is None and place.startswith("predicted")):
        yield f"{place} {old!r} → {new!r}"


def _apart(edges: Sequence[PlanEdge], others: Sequence[PlanEdge]) -> str:
    """The edges that aren't among the others, in words."""
    return ", ".join(
        f"{e.tensor} ({format_bytes(e.bytes_per_micro_batch)} from stage {e.source} to {e.target}"
        f"{'' if e.needs_grad else ', without a gradient'})"
        for e in edges
        if e not in others
    )


def _same_question(one: str | msgspec.UnsetType, other: str | msgspec.UnsetType) -> bool:
    known = isinstance(one, str) and isinstance(other, str)
    return known and one[:_PROVEN_FOR] == other[:_PROVEN_FOR]  # type: ignore[index]


def _not_proven(old: Plan, new: Plan) -> str:
    """Why a bound doesn't hold any more."""
    if old.solver.checksum is msgspec.UNSET:
        return "the plan doesn't say for what it was proven; solve again"
    if not _same_question(old.solver.checksum, new.solver.checksum):
        return "it was proven for other devices, links, settings or costs; solve again"
    if _found_was_edited(old.solver):
        return "what the solver had proven was edited; solve again"
    return "the plan isn't one of those that it was proven for"
