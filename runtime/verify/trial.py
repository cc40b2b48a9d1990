"""A trial before a profile or run: two mini-batches trained plainly and in pieces must agree.

Two mini-batches are trained twice, plainly and in pieces (`trial_sides`). In pieces, micro-batches
go through a cut model one behind the other, as in a pipeline, and weights are written into between
a forward and its backward, as in systems that don't flush. What comes out otherwise is refused:
what it hangs on is found out by leaving one of that after another.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from textwrap import shorten

import torch
from torch import Tensor

from ...profiles.errors import TargetError, TimeprestError
from ...profiles.measuring.trial import TRIAL_MICRO_BATCHES, TrialCase, TrialReport, trial_samples
from ...profiles.tasks.hooks import describe_error, in_one_line
from ...profiles.units import format_bytes
from ..communication.transport import free_bytes
from ..prepare.devices import forward_context, modes_of, move, own_device
from ..prepare.distribution import laid_on
from ..prepare.prepared import Prepared
from ..prepare.tied_parameters import check_memory
from ..prepare.tracing import trace_for_run
from ..settings import RunSettings
from ..stage.optimizer import make_optimizer, make_scheduler
from .compare import largest
from .trial_sides import (
    MINI_BATCHES,
    Groups,
    Perturbed,
    TrainingInPieces,
    TrialStep,
    put_back,
    remembers,
    train_plainly,
)

NOT_TRIED = "training in pieces wasn't tried beside plain training"
_MOST_S = 10.0
"""What a trial may take."""
_TIMES_PARAMETERS = 16
"""Bytes that it takes, over those of the parameters."""
_PASSES, _BYTES_PER_S = 40, 2e9
"""Times that it goes over the parameters, and how fast."""
_STEPS = 4 * MINI_BATCHES * 3
"""Forwards of a micro-batch that take as long as a trial: both sides, two of each mini-batch, and
backwards."""
_STAGES = 4
"""At most, of drawn stages."""
_PIECES = 64
"""At most; of more layers, not each is cut off."""

_WITHIN = 1e-3, 5e-2
"""Of a tensor's largest number, what it may differ by: in single and double precision, in half."""
_NOISE = 1e-5, 1e-3
"""Of the largest gradient of any parameter: what is left of some are rounding errors alone."""
_MOST_CHARACTERS = 160
_SHAKEN = 10.0
"""What differs by more is refused where it is so much more than what weights that are changed in
their last digits make."""


def try_in_pieces(case: TrialCase, settings: RunSettings | None = None) -> TrialReport:
    """Train two mini-batches plainly and in pieces.

    Args:
        settings: of the run; by default those of one where nothing is said.

    Raises TargetError where pieces don't train what plain training does.
    """
    settings = settings or RunSettings(task=case.name)
    try:
        with put_back(case):
            made = make_optimizer(case.task, settings, case.model.named_parameters())
            make_scheduler(case.task, settings, made, case.length)
    except TimeprestError:
        # A run that can't make them says so itself.
        return TrialReport()
    held = sum(p.nbytes for p in case.model.parameters())
    free = free_bytes(case.device)
    if _TIMES_PARAMETERS * held > free:
        need = format_bytes(_TIMES_PARAMETERS * held)
        return _not_tried(case, f"it would take {need}, and {format_bytes(free)} are free")
    with in_one_line(f"{case.name}: plain training failed"):
        took_s = _warm_up(case) * _STEPS + held * _PASSES / _BYTES_PER_S
        if took_s > _MOST_S:
            return _not_tried(case, f"it would take {took_s:.0f} s")
        wanted = train_plainly(case, settings)
    if not all(math.isfinite(loss) for step in wanted for both in step.losses for loss in both):
        # Of numbers that aren't, any two pass for the same.
        return _not_tried(case, "plain training gives a loss that isn't finite")
    return _TrialRun(case, settings, wanted).run()


def try_plan(prepared: Prepared) -> tuple[str, ...]:
    """The same before a run, with the plan's own cut, in its micro-batches. The model is built and
    traced once more. Returns lines to warn of.

    Raises as `try_in_pieces`, and TargetError where the system has other versions than a backward
    takes.
    """
    plan, settings = prepared.plan, prepared.settings
    size, device = plan.micro_batch, own_device(plan, settings, 0)
    with modes_of(plan, settings).on():
        traced = trace_for_run(settings.task, plan, [size], evaluate=False, seed=settings.seed)
    graph = traced.training[size]
    move([traced.model, graph.module], device)
    groups, _ = laid_on(plan, traced, size)
    samples = trial_samples(*traced.target.call(TRIAL_MICRO_BATCHES * size), lambda t: t.to(device))
    case = TrialCase(
        name=traced.target.name,
        task=traced.task,
        model=traced.model,
        graph=graph,
        micro_batches=samples,
        bound=(),
        length=prepared.length,
        autocast=prepared.model.autocast,
        device=device,
        overwrites=not plan.system.flushes,
        cuts=(tuple(map(tuple, groups)),) * MINI_BATCHES,
    )
    found = try_in_pieces(case, settings)
    if found.unversioned:
        raise TargetError(f"{found.lines[-1]}; {plan.variant} doesn't")
    return found.lines


def _not_tried(case: TrialCase, why: str) -> TrialReport:
    return TrialReport((f"{case.name}: {NOT_TRIED}: {why}",))


def _warm_up(case: TrialCase) -> float:
    """Forwards and their losses. Returns a forward's seconds."""
    call, expected = case.micro_batches[0]
    took_s = 0.0
    with put_back(case), forward_context(case.autocast, case.device.type):
        # What earlier looks left to the loss is read the first time, which is slow, too.
        for _ in range(2):
            begin = time.perf_counter()
            output = call.of(case.model, [t.clone() for t in call.tensors])
            took_s = time.perf_counter() - begin
            case.task.loss(output, expected)
    return took_s


# Where it is cut --------------------------------------------------------------------------------


def drawn_cuts(case: TrialCase) -> tuple[Groups, Groups]:
    """A few stages, and as many pieces as can be."""
    layers = len(case.graph.layers)
    inside = {k for group in case.bound for k in range(min(group), max(group))}
    ends = [k for k in range(layers - 1) if k not in inside]
    drawn = random.Random(layers)
    found: list[Groups] = []
    for most in (_STAGES, _PIECES):
        chosen = sorted(drawn.sample(ends, min(most - 1, len(ends))))
        borders = [0, *(end + 1 for end in chosen), layers]
        found.append(tuple(tuple(range(a, b)) for a, b in pairwise(borders)))
    return found[0], found[1]


# What differs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Odd:
    """The first that comes out otherwise than by plain training: its kind, and words for it."""

    what: str
    text: str


LOSS, GRADIENT, BUFFER, UPDATE, FAILURE = "loss", "gradient", "buffer", "update", "failure"


class _Tolerance:
    """What passes for rounding. `spread`: plain training on weights changed in last digits."""

    def __init__(self, case: TrialCase, wanted: Sequence[TrialStep]) -> None:
        halves = (torch.float16, torch.bfloat16)
        coarse = case.autocast is not None or any(
            p.dtype in halves for p in case.model.parameters()
        )
        self.within, self.noise = _WITHIN[coarse], _NOISE[coarse]
        held = set(map(id, case.graph.module.parameters()))
        self.held = {name for name, p in case.model.named_parameters() if id(p) in held}
        self.wanted = wanted
        self.spread: Sequence[TrialStep] = wanted

    def losses(self, b: int, found: TrialStep) -> _Odd | None:
        wanted = self.wanted[b]
        most = max(abs(loss[0]) for loss in wanted.losses)
        for i, (mine, own) in enumerate(zip(found.losses, wanted.losses, strict=True)):
            for x, y, other in zip(mine, own, self.spread[b].losses[i], strict=True):
                allowed = self.within * abs(y) + self.noise * most + _SHAKEN * abs(other - y)
                if abs(x - y) > allowed or math.isnan(x) != math.isnan(y):
                    return _Odd(LOSS, f"the loss is {x:.6g} instead of {y:.6g}")
        return None

    def gradients(self, b: int, found: TrialStep) -> _Odd | None:
        mine, own, spread = found.gradients, self.wanted[b].gradients, self.spread[b].gradients
        apart = {name: _apart(mine.get(name), own.get(name)) for name in {**own, **mine}}
        if not any(apart.values()):
            return None
        sizes = {name: largest(g) for name, g in own.items()}
        noise = self.noise * max(sizes.values(), default=0.0)
        worst, odd = 0.0, None
        for name, by in apart.items():
            size, shaken = sizes.get(name, 0.0), _apart(spread.get(name), own.get(name))
            if by > max(self.within * size + noise + _SHAKEN * shaken, worst):
                text = f"the gradient of parameter {name!r} is off by {by:.2g}, of {size:.2g}"
                worst, odd = by, _Odd(GRADIENT, text)
        return odd

    def buffers(self, b: int, found: TrialStep) -> _Odd | None:
        for name, own in self.wanted[b].buffers.items():
            by = _apart(found.buffers.get(name), own)
            if by and by > self.within * largest(own) + _SHAKEN * _apart(
                self.spread[b].buffers.get(name), own
            ):
                return _Odd(BUFFER, f"buffer {name!r} is off by {by:.2g}")
        return None

    def weights(self, b: int, found: TrialStep) -> _Odd | None:
        before = self.wanted[b].before
        for name, own in self.wanted[b].weights.items():
            by = _apart(found.weights[name], own)
            if not by:
                continue
            if name not in self.held:
                return _Odd(UPDATE, f"parameter {name!r} stays as it is: {_IN_NO_LAYER}")
            step = _apart(before[name], own)
            if by > self.within * step + 8 * torch.finfo(own.dtype).eps * largest(own):
                text = f"the update of parameter {name!r} is off by {by:.2g}, of {step:.2g}"
                return _Odd(UPDATE, f"{text}: {_OPTIMIZER}")
        return None


def _apart(found: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference; none is zeros."""
    if found is None or wanted is None:
        there = found if wanted is None else wanted
        return 0.0 if there is None else largest(there)
    if found is wanted or found.shape != wanted.shape:
        return 0.0 if found is wanted else math.inf
    if torch.equal(found, wanted):
        return 0.0
    if not wanted.is_floating_point() and not wanted.is_complex():
        return float((found != wanted).any())
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    by = torch.where(same, torch.zeros_like(wanted), found - wanted).abs()
    # Only one of them is a number.
    by = torch.where(by.isnan(), torch.full_like(by, math.inf), by)
    return float(by.max()) if by.numel() else 0.0


# The trial, and what a difference hangs on ------------------------------------------------------

_LOSS_READS = (
    "the loss reads what the model's forward leaves outside its result (what a hook or a layer "
    "keeps in an attribute, a list or a dict), and has that of another micro-batch, or of another "
    "process; return it from the model's forward"
)
_OVERTAKEN = (
    "a backward takes what its forward has left in an attribute, where another micro-batch's "
    "forward has been by then; keep it on ctx, or save it by ctx.save_for_backward"
)
_LAYER_READS = (
    "a layer reads what another leaves outside its result (what a hook or a layer keeps in an "
    "attribute, a list or a dict), and has that of another micro-batch, or of another process; "
    "hand it on as an argument, or keep both in one layer (--granularity NAME-PATTERN of a module "
    "around them)"
)
_REMEMBERS = (
    "the forward goes by what it remembers of earlier ones (an attribute, a list or a tuple in "
    "one), which the layers' graph keeps as it was when it was traced; keep it in a buffer, "
    "written into in place, or hand it on as an argument"
)
_MODES = (
    "the forward asks whether autocast is on (torch.is_autocast_enabled), and the layers' graph "
    "was made without; under {dtype} it would be another network"
)
_GRAPH = (
    "the layers' graph isn't what the model does (a hook, a random branch or a state that a trace "
    "can't see)"
)
_CUT = (
    "{where}: a layer does something to what others take besides (a hook on its "
    "gradient, a change in place), which doesn't come over a cut; keep them in one layer "
    "(--granularity NAME-PATTERN of a module around them)"
)
_UNVERSIONED = (
    "a backward takes {names} as memory has it then, and not as its forward did (detached and kept "
    "on ctx, or in a closure): have it take what is saved by ctx.save_for_backward, or the "
    "parameter itself, or plan with a system that flushes (gpipe), where no update comes between"
)
_IN_NO_LAYER = (
    "the loss trains it, and it is in none of the layers; return it, or what the loss computes "
    "from it, as an output of forward"
)
_OPTIMIZER = (
    "a stage's optimizer has its own parameters alone, and this one's steps go by all of them "
    "together, or by what the task keeps for all, so that stages train otherwise than one process"
)
_UNKNOWN = "micro-batches in flight and other weights together make the difference"


class _TrialRun:
    def __init__(self, case: TrialCase, settings: RunSettings, wanted: Sequence[TrialStep]) -> None:
        self.case = case
        self.settings = settings
        self.wanted = wanted
        self.tolerance = _Tolerance(case, wanted)
        self.lines: list[str] = []
        cuts = case.cuts or drawn_cuts(case)
        whole: Groups = (tuple(range(len(case.graph.layers))),)
        trained = frozenset[str]()
        if case.overwrites:
            # Systems that don't flush may not take it.
            with suppress(TargetError):
                check_memory([case.model])
                named = case.model.named_parameters()
                trained = frozenset(name for name, p in named if p.requires_grad)
        self.whole = Perturbed((whole,) * MINI_BATCHES, whole, False, frozenset())
        self.all = Perturbed(cuts, cuts[0], True, trained)

    def run(self) -> TrialReport:
        name = self.case.name
        try:
            odd = self.odd(self.all)
        except TimeprestError as refusal:
            # Some are of weight versions, which systems that flush have none of.
            self.lines.append(f"{name}: systems that don't flush refuse it: {refusal}")
            self.all = replace(self.all, overwritten=frozenset())
            try:
                odd = self.odd(self.all)
            except TimeprestError as other:
                self.lines[-1] = f"{name}: trained in pieces, it is refused: {other}"
                return TrialReport(tuple(self.lines))
        if odd is not None and odd.what != UPDATE:
            again = self.compare(train_plainly(self.case, self.settings))
            if again is not None:
                return _not_tried(self.case, f"of two plain trainings, {again.text}")
            self.tolerance.spread = train_plainly(self.case, self.settings, shaken=True)
            odd = self.odd(self.all)
        return self.report(odd)

    def report(self, odd: _Odd | None) -> TrialReport:
        name, unversioned = self.case.name, list[str]()
        while odd is not None and odd.what != UPDATE:
            if (cause := self.cause()) is not None:
                raise TargetError(f"{name}: trained in pieces, {odd.text}: {cause}")
            unversioned.append(self.unversioned())
            self.all = replace(self.all, overwritten=self.all.overwritten - {*unversioned})
            odd = self.odd(self.all)
        if odd is not None:
            self.lines.append(f"{name}: trained in pieces, {odd.text}")
        if unversioned:
            names = shorten(", ".join(map(repr, unversioned)), 120, placeholder=" …")
            self.lines.append(f"{name}: {_UNVERSIONED.format(names=names)}")
        return TrialReport(tuple(self.lines), tuple(unversioned))

    def odd(self, how: Perturbed) -> _Odd | None:
        """The first difference. Raises TimeprestError where pieces refuse it themselves."""
        steps = TrainingInPieces(self.case, self.settings, how).steps(self.wanted)
        try:
            return self.compare(steps)
        except TimeprestError:
            raise
        except Exception as error:  # the user's code
            text = shorten(describe_error(error), _MOST_CHARACTERS, placeholder=" …")
            return _Odd(FAILURE, f"it fails with {text}")

    def compare(self, steps: Iterable[TrialStep]) -> _Odd | None:
        for b, found in enumerate(steps):
            odd = (
                self.tolerance.losses(b, found)
                or self.tolerance.gradients(b, found)
                or self.tolerance.buffers(b, found)
                or self.tolerance.weights(b, found)
            )
            if odd is not None:
                return odd
        return None

    # What a difference hangs on ----------------------------------------------------------

    def cause(self) -> str | None:
        """Of a difference that all of it together makes; None: that weights are written into."""
        whole, cut = self.whole, replace(self.whole, cuts=self.all.cuts)
        if self.odd(whole) is not None:
            return self._of_graph()
        if (odd := self.odd(replace(whole, together=True))) is not None:
            return _OVERTAKEN if odd.what in (GRADIENT, BUFFER) else _LOSS_READS
        if self.odd(cut) is not None:
            return self._of_cut(cut)
        if self.odd(replace(cut, together=True)) is not None:
            return _LAYER_READS
        if self.odd(replace(whole, overwritten=self.all.overwritten)) is not None:
            return None
        return _UNKNOWN

    def _of_graph(self) -> str:
        if self.case.autocast is not None:
            without = replace(self.case, autocast=None)
            trial = _TrialRun(without, self.settings, train_plainly(without, self.settings))
            if trial.odd(trial.whole) is None:
                return _MODES.format(dtype=str(self.case.autocast).removeprefix("torch."))
        return _REMEMBERS if remembers(self.case) else _GRAPH

    def _of_cut(self, cut: Perturbed) -> str:
        """The first piece that makes a difference when it is cut off, by its layers."""
        names = [layer.name for layer in self.case.graph.layers]
        begin = time.perf_counter()
        for groups in dict.fromkeys(reversed(cut.cuts)):
            for k, group in enumerate(groups):
                sides = [tuple(sorted(chain(*side))) for side in (groups[:k], groups[k + 1 :])]
                three = tuple(part for part in (sides[0], group, sides[1]) if part)
                if self.odd(replace(cut, cuts=(three,) * MINI_BATCHES)) is not None:
                    own = shorten(", ".join(names[k] for k in group), 120, placeholder=" …")
                    return _CUT.format(where=f"where it is cut before and behind {own}")
                if time.perf_counter() - begin > _MOST_S:
                    break
        return _CUT.format(where="where it is cut")

    def unversioned(self) -> str:
        """A parameter that makes a difference when it is written into, found by halves."""
        names = [n for n, _ in self.case.model.named_parameters() if n in self.all.overwritten]
        while len(names) > 1:
            half = names[: len(names) // 2]
            some = replace(self.whole, overwritten=frozenset(half))
            names = half if self.odd(some) is not None else names[len(half) :]
        return names[0]
