"""Profiles of Sailor (SOSP'25, github.com/eth-easl/sailor), measured layer by layer on GPUs.

``profiles_tmp.json``: model → GPU → micro-batch → tensor-parallel degree → layer → seconds of
[forward, backward, update]. ``llm_info.json``: model → degree → layer → floats of parameters, of
its output and of what its forward keeps, of one sample on each rank. Layers are "0", the embedding,
and on to the head.

A tensor-parallel group is one device: it has the seconds of a rank, and the bytes of all its ranks.

Their tool times the whole optimizer step of a model of two blocks (embedding, two blocks, head) and
writes it to every layer. So what it is per byte comes of that model's parameters: at several
degrees a rank steps over different ones, and the line through these says what a step takes besides.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ..errors import FileError, TargetError
from ..files import Count, Seconds, read_json
from ..imported.cost_graph import MAX_BYTES, Cost, Tensor, choose_sizes, costs_of, make_profile
from ..options import Option
from ..profile import OptimizerCost, Profile

_GROUP = "Profiles of Sailor"
_FLOAT_BYTES = 4
_FACTS = "llm_info.json"
_TIMED_BLOCKS = 2
"""In the model whose update they time; its other layers are the first and the last."""
_ADAM_STATE = 2.0

_Floats = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES // _FLOAT_BYTES)]


class LayerFacts(msgspec.Struct, frozen=True, rename={"saved_floats": "act_mem_floats"}):
    """A layer on one rank, for one sample."""

    params_floats: _Floats
    act_output_floats: _Floats
    saved_floats: _Floats


@dataclass(frozen=True)
class SailorFile:
    """Reads such a file; its fields are the options of ``tp-profile`` that choose what of it."""

    model: Annotated[str | None, Option(_GROUP, usual="the only one")] = None
    """Which of the file's models."""
    gpu: Annotated[str | None, Option(_GROUP, usual="the only one")] = None
    """Which GPU it was measured on."""
    tp: Annotated[Count | None, Option(_GROUP, usual="the only one")] = None
    """The tensor-parallel degree: a device of the profile is a group of so many ranks."""
    facts: Annotated[
        str | Path | None,
        Option(_GROUP, usual="llm_info.json beside it", metavar="FILE", names="file"),
    ] = None
    """Parameters and activations of the layers."""

    def __call__(
        self, where: str, batch_size: int | None, micro_batch_sizes: Sequence[int] | None
    ) -> Profile:
        """The profile; arguments and errors as of `reader.import_profile`."""
        times, model, gpu = self._times(where)
        by_degree = _by_degree(times)
        asked = None if self.tp is None else str(self.tp)
        tp = int(_chosen(f"{where}: {model}: {gpu}", "--tp", asked, by_degree))
        measured = by_degree[str(tp)]
        facts_at = str(self.facts or Path(where).with_name(_FACTS))
        facts = _facts(facts_at, model)
        names, mine = _same_layers(where, measured), _facts_of(facts_at, facts, model, str(tp))
        if missing := [name for name in names if name not in mine]:
            raise FileError(f"{facts_at}: {model}, degree {tp}: has no layer {missing[0]!r}")
        sizes = choose_sizes(where, sorted(measured), batch_size, micro_batch_sizes)
        nbytes = {name: _FLOAT_BYTES * tp * mine[name].act_output_floats for name in names}
        tensors = [Tensor(n, n, nbytes[n] * sizes.given, needs_grad=True) for n in names]
        optimizer = _optimizer(by_degree, {d: facts.get(d, {}) for d in by_degree}, tp)
        profile = make_profile(
            where,
            "sailor",
            sizes,
            [_cost(n, names, measured, mine[n], tp) for n in names],
            zip(names, [*names[1:], "output"], tensors, strict=True),
            optimizer=optimizer,
            assumptions=_assumptions(model, gpu, tp, optimizer),
        )
        return msgspec.structs.replace(profile, dtype="float32")

    def _times(self, where: str) -> tuple[Mapping[int, Any], str, str]:
        """By micro-batch: by degree, what was measured of the model on the GPU; and their names."""
        found = _read(where, "model → GPU → micro-batch → tensor-parallel degree → layer")
        model = _chosen(where, "--model", self.model, found)
        gpus = _table(found[model], f"{where}: {model}")
        gpu = _chosen(f"{where}: {model}", "--gpu", self.gpu, gpus)
        place = f"{where}: {model}: {gpu}"
        return (
            {
                _count(place, size): {
                    str(_count(place, degree)): _seconds(f"{place}: {size}: {degree}", layers)
                    for degree, layers in _table(degrees, f"{place}: {size}").items()
                }
                for size, degrees in _table(gpus[gpu], place).items()
            },
            model,
            gpu,
        )


_Times = Mapping[str, tuple[float, float, float]]
"""Of each layer."""


def _by_degree(times: Mapping[int, Mapping[str, _Times]]) -> dict[str, dict[int, _Times]]:
    """By degree and micro-batch instead."""
    degrees = sorted({degree for of in times.values() for degree in of}, key=lambda d: (len(d), d))
    return {
        degree: {size: of[degree] for size, of in times.items() if degree in of}
        for degree in degrees
    }


def _cost(
    name: str, names: Sequence[str], measured: Mapping[int, _Times], facts: LayerFacts, tp: int
) -> Cost:
    saved = _FLOAT_BYTES * tp * facts.saved_floats
    kind = {names[0]: "embedding", names[-1]: "head"}.get(name, "block")
    return Cost(
        name=name,
        kind=kind,
        measured=[
            costs_of(size, *layers[name][:2], saved * size)
            for size, layers in sorted(measured.items())
        ],
        parameter_bytes=_FLOAT_BYTES * tp * facts.params_floats,
        saves=(name,) if facts.saved_floats >= facts.act_output_floats else (),
    )


def _optimizer(
    times: Mapping[str, Mapping[int, _Times]],
    facts: Mapping[str, Mapping[str, LayerFacts]],
    tp: int,
) -> OptimizerCost:
    """What a step of a group costs: seconds besides, and for each byte of all its ranks."""
    points = {
        degree: (_timed_bytes(facts[degree]), _update_s(measured))
        for degree, measured in times.items()
        if facts[degree]
    }
    nbytes, seconds = points[str(tp)]
    fixed_s, per_byte_s = 0.0, seconds / nbytes if nbytes else 0.0
    if len({count for count, _ in points.values()}) > 1:
        slope, besides = statistics.linear_regression(*zip(*points.values(), strict=True))
        if slope > 0 and 0 < besides < seconds:
            # Through what was measured at this degree.
            fixed_s, per_byte_s = besides, (seconds - besides) / nbytes
    return OptimizerCost(
        name="adam",
        state_bytes_per_parameter_byte=_ADAM_STATE,
        update_fixed_s=fixed_s,
        update_s_per_byte=per_byte_s / tp,
    )


def _timed_bytes(facts: Mapping[str, LayerFacts]) -> int:
    """Parameters of the model whose update was timed, on one rank."""
    names = sorted(facts, key=_place)
    timed = {*names[: 1 + _TIMED_BLOCKS], names[-1]}
    return _FLOAT_BYTES * sum(facts[name].params_floats for name in timed)


def _update_s(measured: Mapping[int, _Times]) -> float:
    """Of that model; it is the same at all sizes, but for noise."""
    return statistics.median(update for of in measured.values() for _, _, update in of.values())


def _assumptions(model: str, gpu: str, tp: int, optimizer: OptimizerCost) -> Iterator[str]:
    yield f"Of Sailor's profiles, {model} on {gpu}; layers follow each other in a chain."
    if tp > 1:
        yield (
            f"A device is a tensor-parallel group of {tp} ranks: seconds are a rank's, bytes those "
            f"of all {tp}."
        )
    yield (
        "Floats take 4 bytes; outputs and what layers keep were known for one sample and taken to "
        "be proportional; gradients are as large as the tensors they belong to."
    )
    yield (
        "The update was timed once for a model of two blocks, embedding and head: from its "
        f"parameters {optimizer.update_s_per_byte * 1e12:.3g} ps a byte and "
        f"{optimizer.update_fixed_s * 1e6:.3g} µs a step, with Adam's state."
    )


# The files as they are written -------------------------------------------------------------------


def _read(where: str, expected: str) -> Mapping[str, Any]:
    try:
        found = msgspec.json.decode(read_json(Path(where), f"expected Sailor's JSON of {expected}"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{where}: not valid JSON: {error}") from None
    return _table(found, where, expected)


def _table(found: Any, where: str, expected: str = "") -> Mapping[str, Any]:
    if not isinstance(found, dict) or not found:
        more = f" of {expected}, as Sailor's" if expected else ""
        raise FileError(f"{where}: expected an object{more}")
    return found


def _chosen(where: str, flag: str, asked: str | None, there: Collection[str]) -> str:
    """What was asked for, or the only one that there is. Raises TargetError naming all."""
    if asked is None and len(there) == 1:
        return next(iter(there))
    if asked is None:
        raise TargetError(f"{where}: has {', '.join(there)}; choose one with {flag}")
    if asked not in there:
        raise TargetError(f"{where}: {flag} {asked}: isn't there; there are {', '.join(there)}")
    return asked


def _count(where: str, text: str) -> int:
    """The size of a micro-batch, or a tensor-parallel degree."""
    if not text.isdecimal() or not text.isascii() or not 0 < len(text) < 10 or not int(text):
        raise FileError(f"{where}: {text!r}: expected a whole number from 1")
    return int(text)


def _seconds(where: str, layers: Any) -> _Times:
    found = {}
    for name, three in _table(layers, where).items():
        try:
            found[name] = msgspec.convert(three, tuple[Seconds, Seconds, Seconds])
        except msgspec.ValidationError as error:
            raise FileError(
                f"{where}: layer {name}: give seconds of forward, backward, update: {error}"
            ) from None
    return found


def _place(name: str) -> tuple[int, str]:
    """Where a layer stands: by its number."""
    return (len(name), name)


def _same_layers(where: str, measured: Mapping[int, _Times]) -> list[str]:
    """Names of the layers, which all sizes must have. Raises FileError."""
    first, *rest = sorted(measured)
    for size in rest:
        if measured[size].keys() != measured[first].keys():
            raise FileError(f"{where}: micro-batches of {first} and {size} have different layers")
    return sorted(measured[first], key=_place)


_Facts = dict[str, dict[str, LayerFacts]]


def _facts(where: str, model: str) -> _Facts:
    """By degree and layer. Raises FileError."""
    found = _read(where, "model → degree → layer; --facts names another file")
    if model not in found:
        raise FileError(f"{where}: has no {model}; it has {', '.join(found)}")
    try:
        return msgspec.convert(found[model], _Facts)
    except msgspec.ValidationError as error:
        raise FileError(f"{where}: {model}: {error}") from None


def _facts_of(where: str, facts: _Facts, model: str, degree: str) -> dict[str, LayerFacts]:
    if not facts.get(degree):
        raise FileError(f"{where}: {model}: has no degree {degree}; it has {', '.join(facts)}")
    return facts[degree]
