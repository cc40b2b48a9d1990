"""Digests by which workers check that `data`, called on each of them, gave all the same samples.

The first stage takes a sample's inputs and the last one its target, from data of their own. Lengths
are compared before training, and digests of the first samples of every epoch and evaluation. Where
stages read only parts of samples, those who take inputs look at whole samples once, so that inputs
and targets are known to belong together; later on at which samples they are.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import TensorDataset

from ...profiles.errors import TargetError
from ...profiles.tasks.parts import ALL, INPUTS, TARGET, Parts
from ...profiles.tasks.prefetch import OwnRandomness
from ...profiles.tasks.task import Split
from ..communication.all_reduce import ALL_WORKERS
from ..prepare.data import Segment
from ..prepare.samples import Samples
from ..stage.runner import StageRunner

MINI_BATCHES = 2
"""So many of an epoch's first ones are compared, and as many evaluation micro-batches;"""
SAMPLES = 128
"""so many samples at most, and those of one micro-batch at least."""

_WORDS = struct.Struct("<2q")
_ADVICE = (
    "every worker calls data for itself, so the same call must give the same samples: seed each "
    "random generator in it with a number (docs/tasks.md)"
)

Row = Sequence[int]
"""What a replica has to compare, as numbers; empty: nothing."""


def compare_lengths(runners: Sequence[StageRunner]) -> None:
    """Check before training that splits are as long on all workers, whenever they are asked for.

    Args:
        runners: of this process.

    Raises TargetError, on all workers.
    """
    prepared = runners[0].prepared
    splits: tuple[Split, ...] = ("train", "test") if prepared.settings.evaluate else ("train",)

    def lengths(runner: StageRunner) -> Row:
        found = [prepared.samples, prepared.samples]
        if runner.data.loads:
            found[1] = runner.data.samples("train").size or prepared.samples
        return [*found, *(runner.data.samples(split).size or -1 for split in splits[1:])]

    rows = _gather_rows(runners, "the lengths of the data", 2 + len(splits[1:]), lengths)
    first, *others = rows
    for number, row in rows:
        if row[0] != row[1]:
            raise TargetError(
                f"data('train') has {row[0]} samples and then {row[1]} on "
                f"{_name(runners, number)}: {_ADVICE}"
            )
    for number, row in others:
        for split, mine, wanted in zip(splits, row[1:], first[1][1:], strict=True):
            if mine != wanted:
                raise TargetError(
                    f"data({split!r}) has {wanted} samples on {_name(runners, first[0])} and "
                    f"{mine} on {_name(runners, number)}: {_ADVICE}"
                )


def compare_training(runners: Sequence[StageRunner], segment: Segment) -> None:
    """Check before a segment that its first mini-batches hold the same on all workers.

    Raises as `compare_lengths`.
    """
    plan = runners[0].prepared.plan
    parts = list(_first_parts(segment, plan.micro_batch))
    _compare(
        runners,
        "train",
        f"the first mini-batches of epoch {segment.epoch + 1}",
        lambda samples: (samples.take(segment.epoch, part, len(part)) for part in parts),
        lambda samples: " ".join(samples.chosen(segment.epoch, part) for part in parts),
    )


def compare_evaluation(runners: Sequence[StageRunner]) -> None:
    """Check that an evaluation's first micro-batches are the same. Raises as `compare_lengths`."""
    size = runners[0].prepared.distribution.evaluation_samples
    count = min(max(SAMPLES // size, 1), MINI_BATCHES, runners[0].data.evaluations)
    _compare(
        runners,
        "test",
        "the first micro-batches",
        lambda samples: (samples.evaluation(k)[:2] for k in range(count)),
        lambda samples: "",
    )


def _first_parts(segment: Segment, size: int) -> Iterator[range]:
    """Positions of a segment's first samples, none of which lie in two mini-batches."""
    left = max(SAMPLES, size)
    for b in range(min(MINI_BATCHES, segment.mini_batches)):
        begin = (segment.offset + b) * segment.mini_batch
        end = begin + min(segment.samples_of(b), left)
        for start in range(begin, end, size):
            yield range(start, min(start + size, end))
        left -= end - begin


_Take = Callable[[Samples], Iterator[tuple[Any, Any]]]
"""Inputs and targets of a few samples, as a worker has them."""


def _compare(
    runners: Sequence[StageRunner],
    split: Split,
    what: str,
    take: _Take,
    chosen: Callable[[Samples], str],
) -> None:
    prepared = runners[0].prepared
    if len(prepared.replicas) == 1:
        return
    own = set(prepared.model.inputs)
    taking = {s for s, piece in enumerate(prepared.model.pieces) if own & set(piece.inputs)}
    alone = taking <= {len(prepared.model.pieces) - 1}

    def digests(runner: StageRunner) -> Row:
        if not runner.data.loads or (split == "test" and not runner.replica.leads):
            return []
        samples = runner.data.samples(split)
        # What one stage alone takes may depend on random numbers (crops of an image): there all
        # have the same ones, so that other causes show. What several must have alike may not.
        drawn = OwnRandomness(0 if alone else 1 + runner.replica.number)
        with drawn():
            inputs, targets = _digests(take(samples))
        if drawn.used and not alone and len(taking) == 1:
            with OwnRandomness(0)():
                inputs, _ = _digests(take(samples))
        there = samples.parts
        has = [there == ALL, there == {TARGET}, INPUTS in there]
        read = targets
        cheap = isinstance(samples.dataset, TensorDataset)
        if there != ALL and (INPUTS in there or cheap) and not samples.looked:
            samples.looked = True
            mine = inputs if INPUTS in there else None
            targets, read, inputs = _look(samples, split, what, take, mine)
            has = [True] * 3
        order = hashlib.blake2b(chosen(samples).encode(), digest_size=_WORDS.size).digest()
        return [*has, *(n for each in (targets, read, inputs, order) for n in _WORDS.unpack(each))]

    rows = _gather_rows(runners, f"the data of {what}", 11, digests)
    for k, part in enumerate(("targets", "targets", "inputs", "samples")):
        here = slice(3 + 2 * k, 5 + 2 * k)
        having = [each for each in rows if k == 3 or each[1][k]]
        for number, row in having[1:]:
            wanted, first = having[0]
            if row[here] != first[here]:
                raise TargetError(
                    f"data({split!r}) gives other {part} for {what} on {_name(runners, number)} "
                    f"than on {_name(runners, wanted)}: {_ADVICE}"
                )


def _look(
    samples: Samples, split: Split, what: str, take: _Take, mine: bytes | None
) -> tuple[bytes, bytes, bytes]:
    """Digests of samples by all ways of reading them: of whole ones' targets, of targets as who
    reads nothing else has them, and of inputs. `mine`: of the inputs that are read; None: none are.
    Raises TargetError where parts of samples aren't what whole ones have."""
    ways = [samples.for_a_look(parts) for parts in (ALL, Parts({TARGET}))]
    try:
        with OwnRandomness(0)():
            pairs, read = ([*take(way)] for way in ways)
    finally:
        for way in ways:
            way.close()
    inputs, targets = _digests(iter(pairs))
    wrong = mine is not None and inputs != mine
    for (_, whole), (_, here) in zip(pairs, read, strict=True):
        if isinstance(whole, Mapping) and isinstance(here, Mapping):
            # Of a dict, it may be what the loss takes.
            whole = {key: whole.get(key) for key in here}
        wrong = wrong or _digests(iter([((), whole)])) != _digests(iter([((), here)]))
    if wrong:
        raise TargetError(
            f"data({split!r}): its only(...) doesn't give for {what} what whole samples have: it "
            "must read the same inputs and targets, with the same random numbers "
            "(docs/data.md)"
        )
    return targets, _digests(iter(read))[1], inputs


def _gather_rows(
    runners: Sequence[StageRunner], what: str, width: int, row_of: Callable[[StageRunner], Row]
) -> list[tuple[int, list[int]]]:
    """The rows of all replicas that have one, with their numbers. Waits within the bound."""
    count = len(runners[0].prepared.replicas)
    started = []
    for runner in runners:
        rows = torch.zeros((count, 1 + width), dtype=torch.int64)
        with runner.notes.doing(f"comparing {what}"):
            row = row_of(runner)
            if row:
                rows[runner.replica.number] = torch.tensor([1, *row], dtype=torch.int64)
            started.append((runner, rows, runner.all_reduce.start(ALL_WORKERS, [rows])))
    for runner, _, pending in started:
        with runner.notes.doing(f"comparing {what}"):
            pending.wait()
        # Nobody is at anything that an error would have to tell of.
        runner.notes.status.begin("start")
    found = started[0][1].tolist()
    return [(number, row[1:]) for number, row in enumerate(found) if row[0]]


def _name(runners: Sequence[StageRunner], number: int) -> str:
    return runners[0].prepared.replicas[number].name


def _digests(taken: Iterator[tuple[Any, Any]]) -> tuple[bytes, bytes]:
    both = hashlib.blake2b(digest_size=_WORDS.size), hashlib.blake2b(digest_size=_WORDS.size)
    for pair in taken:
        for found, part in zip(both, pair, strict=True):
            leaves, structure = tree_flatten(part)
            found.update(repr(structure).encode())
            for leaf in leaves:
                _add(found, leaf)
    return both[0].digest(), both[1].digest()


def _add(found: Any, leaf: Any) -> None:
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
        leaf = leaf.detach().cpu().contiguous()
        found.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
        found.update(memoryview(leaf.reshape(-1).view(torch.uint8).numpy()))
    else:
        found.update(f"{type(leaf).__name__} {leaf!r} ".encode())
