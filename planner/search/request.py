"""What a plan may be asked for: the options of ``tp-plan solve``, which are `timeprest.plan`'s."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from ...profiles.errors import UserError
from ...profiles.files import MAX_FACTOR, Count, Factor, ScheduleCount, Tally
from ...profiles.options import Option, Spelled, auto_or_whole, read_record
from ...profiles.profile import Profile
from ...profiles.units import number, parse_share, shown, texts, truth, whole
from ..cluster.catalogue import cluster_of_kinds, with_speeds
from ..cluster.cluster import DEVICES, Cluster, EqualDevices
from ..cluster.headroom import parse_headroom
from ..evaluate import Evaluation
from ..plan import Plan
from ..schedules.given import read_order
from ..systems.orders import Order
from ..systems.variants import VARIANTS, variant_named
from .defaults import TiedAsked
from .planning import Planning as Planning

T = TypeVar("T", Profile, Cluster, Plan)

MUON = {"optimizer_state_factor": 2.0, "matrix_state_factor": 1.0}
"""State of Muon, which keeps a momentum for matrices of hidden layers, and of AdamW for others."""

SYSTEM = "Training system and mini-batch"
MEMORY = "Memory"
STAGES = "Stages"
STALENESS = "Staleness"
SEARCH = "Search"
"""Headings of the options' help."""


def loaded(given: T | str | Path, kind: type[T], name: str) -> T:
    """What was given, or is in the file of that name. Raises UserError, or as `load`."""
    if isinstance(given, (str, Path)):
        return kind.load(given)
    if not isinstance(given, kind):
        what = f"give a {kind.__name__}, or the name of its file"
        raise UserError(f"{name}: {what}, not {type(given).__name__}")
    return given


# Each reads what was given, and raises UserError that names it ------------------------------------


def _systems(given: object, name: str) -> tuple[str, ...]:
    """Names with commas between them, a list of them, or all."""
    if isinstance(given, str):
        given = VARIANTS if given == "all" else [part.strip() for part in given.split(",")]
    found = texts(given, name, "gpipe")
    if not found:
        raise UserError(f"{name}: name one system or more; all: each")
    for each in found:
        variant_named(each)
    return tuple(dict.fromkeys(found))


def _order(path: object, name: str) -> Order:
    if not isinstance(path, (str, Path)):
        raise UserError(f"{name}: give the name of a file, not {type(path).__name__}")
    return read_order(path)


def _with_replicas(value: object, name: str) -> bool:
    if isinstance(value, str) and value in ("auto", "off"):
        return value == "auto"
    return truth(value, name)


def _optimizer_state(value: object, name: str) -> dict[str, float]:
    """What `solve` knows of it."""
    if isinstance(value, str) and value == "muon":
        return MUON
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    factor = number(value, name, MAX_FACTOR, " as 2 for Adam, or muon")
    return {} if factor is None else {"optimizer_state_factor": factor}


def _pins(given: object, name: str) -> tuple[tuple[str, int], ...]:
    """Each layer once, of a mapping or of texts such as ``"layer3=1"``."""
    found: dict[str, int] = {}
    if isinstance(given, Mapping):
        found = {layer: whole(stage, f"{name}[{layer!r}]", 0) for layer, stage in given.items()}
    elif not isinstance(given, Sequence) or isinstance(given, str):
        raise UserError(f"{name}: give each layer's stage by its name, as in {{'layer3': 1}}")
    for text in () if isinstance(given, Mapping) else given:
        layer, separator, stage = str(text).rpartition("=")
        if not separator or not layer or not stage.isdecimal() or len(stage) > 9:
            raise UserError(
                f"{name} {text!r}: give NAME=STAGE, as in {name} layer3=1; 0 is the first"
            )
        if found.setdefault(layer, int(stage)) != int(stage):
            raise UserError(
                f"{name} {layer}={found[layer]}, {name} {layer}={stage}: a layer is on one stage; "
                "leave one out"
            )
    return tuple(found.items())


@dataclass(frozen=True)
class PlanRequest(EqualDevices):
    """What a plan is asked of and may be. Without a cluster there are equal devices.

    Attributes:
        seen: is told of every plan that fits.
    """

    profile: Profile | str | Path
    cluster: Annotated[
        Cluster | str | Path | None,
        Option(DEVICES, flags=("--cluster",), metavar="TOML", names="file"),
    ] = None
    """Devices and links from a file."""
    _: KW_ONLY
    variant: Annotated[
        str | Sequence[str],
        Option(
            SYSTEM,
            names="system",
            read=_systems,
            help=f"Training system: {', '.join(VARIANTS)}; several with commas, or all.",
        ),
    ] = "timeprest"
    order: Annotated[
        str | Path | None, Option(SYSTEM, metavar="FILE", names="file", read=_order)
    ] = None
    """What each device runs, in the system's weight rules and instead of its own order."""
    mini_batch: Annotated[Count | None, Option(SYSTEM, usual="the profile's batch size")] = None
    """Samples per update."""
    micro_batches: Annotated[
        int | Literal["auto"] | None, Option(SYSTEM, metavar="N", read=auto_or_whole)
    ] = "auto"
    """In a mini-batch; auto: the best."""
    update_every: Annotated[
        ScheduleCount | None,
        Option(SYSTEM, usual="1; with --study any that it trained with", metavar="K"),
    ] = None
    """Update the weights after every K mini-batches: smaller version differences."""
    optimizer_state: Annotated[
        float | Literal["muon"] | None,
        Option(SYSTEM, usual="as profiled", metavar="FACTOR", read=_optimizer_state),
    ] = None
    """Bytes of optimizer state per byte of parameters: 0 plain SGD, 1 momentum, 2 Adam; muon: 1 of
    matrices of hidden layers, 2 of others."""
    headroom: Annotated[
        str | float | None,
        Option(
            MEMORY,
            usual="8% of GPUs that weren't measured, else 0",
            metavar="SHARE|BYTES",
            read=parse_headroom,
        ),
    ] = None
    """Of each device's memory, kept free: 8% or 4GiB. Devices of a cluster file may say it."""
    stages: Annotated[
        int | Literal["auto"] | None, Option(STAGES, metavar="N", read=auto_or_whole)
    ] = "auto"
    """How many; auto: the best."""
    replicas: Annotated[
        bool | Literal["auto", "off"], Option(STAGES, values=("auto", "off"), read=_with_replicas)
    ] = "auto"
    """Stages may take several devices, or not."""
    stages_per_device: Annotated[
        int | Literal["auto"] | None,
        Option(
            STAGES,
            usual="auto where that takes a second at most, else 1",
            metavar="V",
            read=auto_or_whole,
        ),
    ] = None
    """1, 2, …: so many on each; auto: more than 1 where that gains 5 % or more."""
    placement: Annotated[Literal["auto", "straight", "loop", "v"], Option(STAGES)] = "auto"
    """Which device runs which stage."""
    sequence: Annotated[Literal["best", "listed"], Option(STAGES)] = "best"
    """Devices of several kinds, or in machines of several sizes: in the best sequence, or as the
    cluster lists them."""
    recompute: Annotated[
        Literal["off", "on", "selective", "auto"] | None,
        Option(STAGES, usual="off; auto where nothing fits so, or it is soon found to be faster"),
    ] = None
    """Stages compute activations again instead of keeping them: none, all, those of some layers, or
    whatever is best."""
    tied: Annotated[TiedAsked, Option(STAGES)] = "auto"
    """Layers that share parameters: on one device, on several with copies, or what is faster."""
    pins: Annotated[
        Mapping[str, int] | Sequence[str],
        Option(STAGES, flags=("--pin",), metavar="NAME=STAGE", several=True, read=_pins),
    ] = ()
    """Layer NAME is on stage STAGE."""
    run_ahead: Annotated[Literal["paper", "auto"], Option(STALENESS)] = "paper"
    """Without a flush: S - s mini-batches in flight on stage s, or as many as pay."""
    max_in_flight: Annotated[Count | None, Option(STALENESS, metavar="L")] = None
    """Mini-batches in flight on a stage at most."""
    max_difference: Annotated[Tally | None, Option(STALENESS, metavar="D")] = None
    """Updates between a mini-batch's forward and the weights of its backward at most."""
    objective: Annotated[
        Literal["period", "loss"] | None, Option(SEARCH, usual="loss with --study, else period")
    ] = None
    """What is to be least: a mini-batch's period, or the time to a study's target."""
    study: Annotated[str | Path | None, Option(SEARCH, metavar="FILE", names="file")] = None
    """Of tp-run study, of this model: what training needs in samples, by the delays of stages."""
    solver: Annotated[Literal["auto", "dp", "ilp"], Option(SEARCH)] = "auto"
    """Dynamic programming, an integer program, or whichever."""
    tolerance: Annotated[str | float, Option(SEARCH, metavar="SHARE", read=parse_share)] = "1%"
    """Of the shortest period: what may be given away for a smaller version difference, then for
    memory, then for even stages."""
    time_limit_s: Annotated[
        Factor | None, Option(SEARCH, flags=("--time-limit",), metavar="SECONDS")
    ] = 60.0
    """Take the best plan found by then."""
    seen: Callable[[Evaluation], None] | None = None

    def read(self, spelled: Spelled = str) -> Planning:
        """What is asked, of profile and cluster that were read.

        Args:
            spelled: what messages call a field.

        Raises UserError for what can't be; as `read_cluster`, `read_order` and `Profile.load`.
        """
        profile = loaded(self.profile, Profile, "profile")
        described = self.described
        if self.cluster is not None and described:
            names = ", ".join(map(spelled, described))
            raise UserError(f"{spelled('cluster')}: leave out {names}; the cluster says it")
        if self.seen is not None and not callable(self.seen):
            raise UserError(f"seen: give a function of a plan, not {shown(self.seen)}")
        asked = read_record(self, spelled, without={"cluster", *EqualDevices.__annotations__})
        for name in ("stages_per_device", "update_every"):
            # Nothing was said; what is read of "auto" is None, too.
            if getattr(self, name) is None:
                del asked[name]
        systems, study, objective = (asked.pop(n) for n in ("variant", "study", "objective"))
        if study is None and objective == "loss":
            raise UserError(
                f"{spelled('objective')} loss: goes with {spelled('study')}, a study of this model "
                "(tp-run study makes one)"
            )
        if study is not None and objective == "period":
            raise UserError(f"{spelled('study')}: is for {spelled('objective')} loss; leave it out")
        asked |= asked.pop("optimizer_state") or {}
        asked["seen"] = self.seen
        if self.cluster is None and self.names_kinds:
            cluster, notes = cluster_of_kinds(self, profile, self.headroom, spelled)
            return Planning(profile, cluster, asked, None, systems, study, notes)
        given = self.equal(spelled) if self.cluster is None else self.cluster
        cluster = loaded(given, Cluster, "cluster")
        cluster = with_speeds(cluster, profile)
        return Planning(profile, cluster, asked, profile.together, systems, study)
