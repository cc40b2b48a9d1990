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
from ..imported.cost_graph import (
    MAX_BYTES,
    Cost,
    Sizes,
    Tensor,
    choose_sizes,
    costs_of,
    make_profile,
)
from ..options import Option
from ..profile import KindTimes, OptimizerCost, Profile

_GROUP = "Profiles of Sailor"
_PROFILES = "model → GPU → micro-batch → tensor-parallel degree → layer"
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


_Times = Mapping[str, tuple[float, float, float]]
"""Of each layer."""


@dataclass(frozen=True)
class SailorFile:
    """Reads such a file; its fields are the options of ``tp-profile`` that choose what of it."""

    model: Annotated[str | None, Option(_GROUP, usual="the only one")] = None
    """Which of the file's models."""
    gpu: Annotated[str | None, Option(_GROUP, usual="the only one", metavar="GPU[,GPU…]")] = None
    """Which GPU it was measured on; several, and the profile has the seconds of each: a cluster
    file says with kind which one a device is."""
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
        found = _read(where, _PROFILES)
        if not all(isinstance(gpus, dict) for gpus in found.values()):
            raise FileError(
                f"{where}: expected Sailor's JSON of {_PROFILES}; a file of another kind needs the "
                "plugin that imports it (--plugin FILE)"
            )
        model = _chosen(where, "--model", self.model, found)
        gpus = _table(found[model], f"{where}: {model}")
        asked = [None] if self.gpu is None else [name.strip() for name in self.gpu.split(",")]
        names = dict.fromkeys(_chosen(f"{where}: {model}", "--gpu", each, gpus) for each in asked)
        facts_at = str(self.facts or Path(where).with_name(_FACTS))
        facts = _facts(facts_at, model)
        on: dict[str, _OnGpu] = {}
        for gpu in names:
            place = f"{where}: {model}: {gpu}"
            times = _by_degree(_times(place, gpus[gpu]))
            tp = _chosen(place, "--tp", None if self.tp is None else str(self.tp), times)
            layers = _same_layers(place, times[tp])
            mine = _facts_of(facts_at, facts, model, tp, layers)
            optimizer = _optimizer(times, facts, int(tp))
            on[gpu] = _OnGpu(gpu, int(tp), layers, times[tp], mine, optimizer)
        first, *others = on.values()
        for other in others:
            if (other.tp, other.layers) != (first.tp, first.layers):
                raise TargetError(
                    f"{where}: {model}: {first.name} and {other.name} have different degrees or "
                    "layers; give --tp, or one --gpu"
                )
        sizes = choose_sizes(where, sorted(first.measured), batch_size, micro_batch_sizes)
        profiles = {name: _profile(where, model, of, sizes) for name, of in on.items()}
        return _with_kinds(profiles, on) if others else profiles[first.name]


@dataclass(frozen=True)
class _OnGpu:
    """A model on a kind of GPU, of one degree; measured by micro-batch."""

    name: str
    tp: int
    layers: Sequence[str]
    measured: Mapping[int, _Times]
    facts: Mapping[str, LayerFacts]
    optimizer: OptimizerCost

    def cost(self, name: str) -> Cost:
        facts, saved = self.facts[name], _FLOAT_BYTES * self.tp * self.facts[name].saved_floats
        kind = {self.layers[0]: "embedding", self.layers[-1]: "head"}.get(name, "block")
        return Cost(
            name=name,
            kind=kind,
            measured=[
                costs_of(size, *layers[name][:2], saved * size)
                for size, layers in sorted(self.measured.items())
            ],
            parameter_bytes=_FLOAT_BYTES * self.tp * facts.params_floats,
            saves=(name,) if facts.saved_floats >= facts.act_output_floats else (),
        )


def _profile(where: str, model: str, on: _OnGpu, sizes: Sizes) -> Profile:
    names = on.layers
    nbytes = {name: _FLOAT_BYTES * on.tp * on.facts[name].act_output_floats for name in names}
    tensors = [Tensor(n, n, nbytes[n] * sizes.given, needs_grad=True) for n in names]
    profile = make_profile(
        where,
        "sailor",
        sizes,
        [on.cost(name) for name in names],
        zip(names, [*names[1:], "output"], tensors, strict=True),
        optimizer=on.optimizer,
        assumptions=_assumptions(model, on),
    )
    return msgspec.structs.replace(profile, dtype="float32")


def _with_kinds(profiles: Mapping[str, Profile], on: Mapping[str, _OnGpu]) -> Profile:
    """The first, with the seconds of all."""
    first, *_ = profiles.values()
    kinds, assumed = [], []
    for name, profile in profiles.items():
        kinds.append(
            KindTimes(
                name=name,
                forward_s=tuple(
                    tuple(m.forward_s for m in layer.measurements) for layer in profile.layers
                ),
                backward_s=tuple(
                    tuple(m.backward_s for m in layer.measurements) for layer in profile.layers
                ),
                update_fixed_s=profile.optimizer.update_fixed_s,
                update_s_per_byte=profile.optimizer.update_s_per_byte,
            )
        )
        missing = [m for m in first.micro_batch_sizes if m not in on[name].measured]
        if missing and name != next(iter(on)):
            assumed.append(
                f"On {name} nothing was measured for {', '.join(map(str, missing))} samples: its "
                "seconds lie on the line through the two nearest sizes."
            )
    assumed.append(f"Devices are {', '.join(on)}: a cluster says which by kind.")
    assumptions = (*first.assumptions, *assumed)
    return msgspec.structs.replace(first, kinds=tuple(kinds), assumptions=assumptions)


def _times(place: str, sizes: Any) -> dict[int, dict[str, _Times]]:
    """By micro-batch: by degree, what was measured on a GPU. Raises FileError."""
    return {
        _count(place, size): {
            str(_count(place, degree)): _seconds(f"{place}: {size}: {degree}", layers)
            for degree, layers in _table(degrees, f"{place}: {size}").items()
        }
        for size, degrees in _table(sizes, place).items()
    }


def _by_degree(times: Mapping[int, Mapping[str, _Times]]) -> dict[str, dict[int, _Times]]:
    degrees = sorted({degree for of in times.values() for degree in of}, key=lambda d: (len(d), d))
    return {
        degree: {size: of[degree] for size, of in times.items() if degree in of}
        for degree in degrees
    }


def _optimizer(
    times: Mapping[str, Mapping[int, _Times]],
    facts: Mapping[str, Mapping[str, LayerFacts]],
    tp: int,
) -> OptimizerCost:
    """What a step of a group costs: seconds besides, and for each byte of all its ranks."""
    points = {
        degree: (_timed_bytes(facts[degree]), _update_s(measured))
        for degree, measured in times.items()
        if facts.get(degree)
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


def _assumptions(model: str, on: _OnGpu) -> Iterator[str]:
    optimizer, tp = on.optimizer, on.tp
    yield f"Of Sailor's profiles, {model} on {on.name}; layers follow each other in a chain."
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


def _facts_of(
    where: str, facts: _Facts, model: str, degree: str, layers: Sequence[str]
) -> dict[str, LayerFacts]:
    """Those of a degree, which has all of these layers. Raises FileError."""
    if not facts.get(degree):
        raise FileError(f"{where}: {model}: has no degree {degree}; it has {', '.join(facts)}")
    missing = [name for name in layers if name not in facts[degree]]
    if missing:
        raise FileError(f"{where}: {model}, degree {degree}: has no layer {missing[0]!r}")
    return facts[degree]
