"""The profile: what a model costs, layer by layer. Data only; nothing here imports torch.

Sizes are affine in the micro-batch size m: ``fixed_bytes + bytes_per_sample * m``.
Times are for a whole micro-batch of the size at hand, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from . import plugins
from .errors import FileError
from .files import (
    MAX_COUNT,
    MAX_FACTOR,
    MAX_FILE_BYTES,
    MIN_SECONDS,
    Bytes,
    BytesPerSample,
    Count,
    Factor,
    Seconds,
    Shown,
    TaggedFile,
    Tally,
    Threads,
    TotalBytes,
    read_file,
    save_file,
)

if TYPE_CHECKING:
    import networkx as nx

FORMAT = "timeprest-profile/1"

FRONT_ENDS = {
    "fx": "torch.fx symbolic tracing",
    "export": "torch.export with a free batch dimension",
    "export-static": "torch.export, one graph for each micro-batch size",
    "sequential": "the children of an nn.Sequential",
}
"""Ways to find a model's graph, and what messages call them; plugins may have others."""

IMPORTED = {"table": "a table of costs", "networkx": "a networkx graph"}
"""What messages call profiles that are made of numbers here; a plugin's are called as it says."""

ELSEWHERE = "imported"
"""The device of profiles that were made elsewhere."""


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One layer at one micro-batch size."""

    micro_batch: Count
    """Samples in the micro-batch."""
    forward_s: Seconds
    backward_s: Seconds
    saved_bytes: Bytes
    """What autograd keeps for the backward, each storage once, parameters left out."""
    workspace_bytes: Bytes
    """Largest working set besides what is kept, in the forward or the backward."""
    relative_error: Factor | None = None
    """Standard error of forward_s + backward_s over their sum; None where nothing was timed."""
    backward_input_s: Seconds | None = None
    """The part of backward_s that gives the gradients of the layer's inputs alone, as in systems
    that split the backward. None: not measured."""
    postponed_bytes: Bytes | None = None
    """Gradients that wait for the rest then, the weight part. None: not measured."""
    backward_weight_s: Seconds | None = None
    """That rest, run by itself when all layers' first parts are through: what both need is done
    twice. None: not measured."""
    saved_tensors: Tally | None = None
    """Tensors that autograd keeps, parameters too. None: not counted."""


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A node of the graph: a module under the user's own path, with the operations behind it."""

    name: str
    kind: str
    parameter_bytes: Bytes
    """Of those that are trained."""
    buffer_bytes: Bytes
    """Of what a run has once, whatever the system: buffers, and parameters that aren't trained."""
    saves: tuple[str, ...]
    """Names of the `storages` among saved_bytes: tensors that other layers may keep too."""
    matrix_bytes: Bytes | msgspec.UnsetType = msgspec.UNSET
    """How much of parameter_bytes is matrices of hidden layers, where there are any."""
    frozen_bytes: Bytes | msgspec.UnsetType = msgspec.UNSET
    """How much of buffer_bytes is parameters that aren't trained (`requires_grad` off)."""
    changes: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Names of the `storages` that it takes and changes in place, where there are any."""
    update_s: Seconds | msgspec.UnsetType = msgspec.UNSET
    """Of the optimizer's step on its parameters, where that is known of the layer by itself."""
    measurements: Annotated[tuple[Measurement, ...], Meta(min_length=1)]


class Storage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Memory of a tensor that goes from layer to layer, or into the model."""

    name: str
    bytes_per_sample: BytesPerSample
    fixed_bytes: Bytes


class Edge(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tensor that one layer makes and another uses."""

    producer: str
    consumer: str
    """A layer's name, or "output": the model's result, needed on the last stage."""
    tensor: str
    """Edges of one producer with the same tensor are one message for each receiving stage."""
    storage: str
    bytes_per_sample: BytesPerSample
    fixed_bytes: Bytes
    needs_grad: bool


class ModelInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tensor that the user's data brings; stages that need it read it themselves."""

    name: str
    shape: tuple[int, ...]
    """Of one sample, the batch dimension left out."""
    dtype: str
    consumers: tuple[str, ...]


Shapes = tuple[tuple[Count, ...], ...]
"""Of each input that the model has, for one sample."""


class VaryingShapes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shapes that inputs have in mini-batches where not all of these are alike."""

    profiled: Shapes
    """In the mini-batch that was measured, the one with the most bytes."""
    least: Shapes
    """The smallest size of each dimension."""
    most: Shapes
    """The largest."""
    batches: Count
    """Mini-batches that were looked at."""

    @property
    def free(self) -> tuple[tuple[int, ...], ...]:
        """Of each input the dimensions that vary, counted with that of the samples."""
        pairs = zip(self.least, self.most, strict=True)
        return tuple(
            tuple(d for d, (a, b) in enumerate(zip(low, high, strict=True), 1) if a != b)
            for low, high in pairs
        )

    def beyond(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether a mini-batch of these shapes, for one sample, has more than any looked at."""
        return any(
            size > most
            for found, limits in zip(shapes, self.most, strict=False)
            for size, most in zip(found, limits, strict=False)
        )


class SharedParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of several layers that share nothing else: each can have a copy of them."""

    layers: Annotated[tuple[str, ...], Meta(min_length=2)]
    """In the order of the layers; they count among the first one's parameter_bytes, or, where they
    aren't trained, among its buffer_bytes."""
    parameter_bytes: Bytes


class OptimizerCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an optimizer step costs: ``update_fixed_s + update_s_per_byte * parameter bytes``."""

    name: str
    state_bytes_per_parameter_byte: Factor
    scratch_bytes_per_parameter_byte: Factor | msgspec.UnsetType = msgspec.UNSET
    """What a step has of memory besides, while it runs; not there where it wasn't measured."""
    update_fixed_s: Seconds
    update_s_per_byte: Seconds


class KindTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds on devices of one kind."""

    name: str
    """What a cluster calls such a device's kind."""
    forward_s: tuple[tuple[Seconds, ...], ...]
    """Of each layer, at each micro-batch size."""
    backward_s: tuple[tuple[Seconds, ...], ...]
    update_fixed_s: Seconds
    """Of an optimizer step, as in `OptimizerCost`."""
    update_s_per_byte: Seconds


class OperationCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What running a stage costs besides its layers, whatever they are."""

    forward_s: Seconds
    """Of each micro-batch: samples, hooks, versions, accounts."""
    mini_batch_s: Seconds
    """Of each mini-batch: around its backward and its update."""
    pack_s: Seconds = 0.0
    """Of each tensor that autograd keeps, in the forward: whether it is a weight is looked up."""
    unpack_s: Seconds = 0.0
    """Of each of them in the backward."""
    update_s_per_byte: Seconds = 0.0
    """Of each byte of parameters, at an update, besides the optimizer's step."""
    keep_s_per_byte: Seconds = 0.0
    """To keep a version of the weights when an update overwrites them."""
    mix_s_per_byte: Seconds = 0.0
    """To make weights between two versions."""
    predict_s_per_byte: Seconds = 0.0
    """To predict weights."""


class Together(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How processes slow each other down that compute at once on the machine profiled."""

    processes: Annotated[int, Meta(ge=2, le=MAX_COUNT)]
    slowdown: Annotated[float, Meta(ge=1, le=MAX_FACTOR)]
    """Time of the whole model's step beside the others, over its time alone."""


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole model in one piece, to hold against the sum of its layers."""

    micro_batch: Count
    forward_s: Seconds
    backward_s: Seconds
    saved_bytes: Bytes


_load_import: list[Callable[[], Callable[..., Profile]]] = []


def import_graphs_with(load: Callable[[], Callable[..., Profile]]) -> None:
    """Have graphs made profiles by what `load` gives: it imports this, so it is handed in."""
    _load_import[:] = [load]


class Profile(TaggedFile, Shown, frozen=True, kw_only=True, tag=FORMAT):
    """A measured model. Layers are in topological order."""

    most: ClassVar[int] = MAX_FILE_BYTES

    target: str
    fingerprint: str
    """Of the graph: layers, operations, parameter shapes and edges; not of the weights."""
    front_end: str = "fx"
    """How the graph was found: one of FRONT_ENDS, or who made the profile of numbers."""
    refusals: tuple[str, ...] = ()
    """Why the front ends tried before that one couldn't take the model."""
    granularity: str = "layer"
    """"layer", "op", or name patterns of the modules that are one layer each."""
    device: str
    """"cpu", "cuda", or "meta:" and the device spec: computed, not measured."""
    gpu: str | msgspec.UnsetType = msgspec.UNSET
    """What CUDA calls the device. Not there on others, and where that wasn't noted yet."""
    threads: Threads
    dtype: str
    autocast: str | None = None
    """Dtype of torch.autocast while measuring; None: off."""
    torch_version: str
    batch_size: Count
    """Samples in the mini-batch that the micro-batch sizes were chosen for."""
    micro_batch_sizes: Annotated[tuple[Count, ...], Meta(min_length=1)]
    inputs: tuple[ModelInput, ...]
    layers: Annotated[tuple[Layer, ...], Meta(min_length=1)]
    edges: tuple[Edge, ...]
    storages: tuple[Storage, ...]
    tied: tuple[tuple[str, ...], ...]
    """Groups of layers that must each stay on one stage: they share parameters or buffers, or
    one of them changes in place what the others use, or has a hook on its gradient."""
    shared: tuple[SharedParameters, ...] = ()
    """Those groups of `tied` that may be split, at the cost of copies."""
    shared_frozen: tuple[SharedParameters, ...] | msgspec.UnsetType = msgspec.UNSET
    """Layers that share parameters which aren't trained, where there are any: each stage has its
    own, with nothing to keep alike."""
    loss: tuple[Measurement, ...]
    """The loss, on the last stage; empty where the target has none."""
    optimizer: OptimizerCost
    whole_model: tuple[Totals, ...]
    together: Together | None = None
    """None: not measured."""
    operation: OperationCost | None = None
    """None: not measured, and planned as if it cost nothing."""
    loading_s_per_sample: Seconds | msgspec.UnsetType = msgspec.UNSET
    """Between two samples of the training data, by loaders that do nothing else; not there where
    the data are in memory, or it wasn't measured."""
    reserved_bytes: Bytes | msgspec.UnsetType = msgspec.UNSET
    """Of a GPU, taken by each process besides its tensors: CUDA's context, loaded kernels,
    workspaces of its libraries. Not there where it wasn't measured."""
    reserved_share: Factor | msgspec.UnsetType = msgspec.UNSET
    """What torch's allocator has besides, for each byte of tensors at their peak."""
    varying: VaryingShapes | msgspec.UnsetType = msgspec.UNSET
    """Not there where the inputs of all mini-batches that were looked at have the same shapes."""
    unversioned: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Parameters that some backward takes as memory has them then, where there are any: only
    systems that flush train them right."""
    kinds: tuple[KindTimes, ...] | msgspec.UnsetType = msgspec.UNSET
    """Seconds on devices of several kinds, that of `layers` first; not there where one was
    profiled."""
    assumptions: tuple[str, ...] = ()
    """What wasn't measured but taken to be so, a sentence each."""

    @property
    def can_run(self) -> bool:
        """Whether there is a model behind it that tp-run could train."""
        return not made_of(self)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile file. Raises FileError naming the file and field."""
        return check_profile(read_file(path, cls), str(path))

    def save(self, path: str | Path) -> None:
        """Write a profile file. Raises FileError, also where another file would be lost."""
        save_file(path, self)

    def to_networkx(self) -> nx.DiGraph:
        """The layers and what goes between them, as a `networkx.DiGraph` (docs/networkx.md).

        Nodes are the layers' names in their order, and behind them "output", the model's result,
        where a layer gives it; edges lead from a producer to a consumer. Of a layer, the fields of
        `Layer` are attributes; an edge has `tensors`, the `Edge` of each tensor that goes there.
        The graph itself has the attribute `profile`, this one.
        """
        import networkx as nx

        graph = nx.DiGraph(profile=self)
        for layer in self.layers:
            attributes = msgspec.structs.asdict(layer)
            graph.add_node(attributes.pop("name"), **attributes)
        for edge in self.edges:
            graph.add_edge(edge.producer, edge.consumer)
            graph.edges[edge.producer, edge.consumer].setdefault("tensors", []).append(edge)
        return graph

    @classmethod
    def from_networkx(
        cls,
        graph: nx.DiGraph,
        *,
        batch_size: int | None = None,
        micro_batch_sizes: Sequence[int] | None = None,
    ) -> Profile:
        """The profile of a graph of one's own, or of what was made of one that `to_networkx` gave.

        Args:
            graph: either has the attributes that `to_networkx` gives, however changed; layers
                that went take their edges along. Or each node, named by a text, has `forward_s`
                and `backward_s`, seconds for a mini-batch, `parameter_bytes`, `activation_bytes`
                and perhaps `saved_bytes`; an edge may have `bytes`, where not all of an activation
                is sent.
            batch_size: samples that such numbers are for.
            micro_batch_sizes: other sizes to list, with costs in proportion.

        Raises:
            FileError: naming the node or edge, for an attribute that is missing or none, for edges
                that form a cycle.
            TargetError: no batch size, or one where the graph has its own.
        """
        return _load_import[0]()(graph, batch_size, micro_batch_sizes)


class ProfileReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What plans say of the profile that they were made from."""

    target: str
    fingerprint: str
    front_end: str = "fx"
    granularity: str = "layer"
    device: str
    threads: Threads
    dtype: str
    autocast: str | None = None
    reserved_bytes: TotalBytes | msgspec.UnsetType = msgspec.UNSET
    reserved_share: Factor | msgspec.UnsetType = msgspec.UNSET
    varying: VaryingShapes | msgspec.UnsetType = msgspec.UNSET
    """Where mini-batches differ in the shapes of inputs: those that were profiled, for one."""

    @classmethod
    def to(cls, profile: Profile) -> ProfileReference:
        """The reference to this one."""
        return cls(**{name: getattr(profile, name) for name in cls.__struct_fields__})


def check_profile(profile: Profile, where: str = "profile") -> Profile:
    """Return the profile if the planner can rely on it.

    Raises FileError: an unknown front end, a name that is used twice or stands for nothing, an edge
    against the order of the layers, or measurements that don't match the micro-batch sizes.
    """
    check_front_end(profile, where)
    position = {layer.name: k for k, layer in enumerate(profile.layers)}
    storages = {storage.name for storage in profile.storages}
    sizes = profile.micro_batch_sizes
    if len(position) != len(profile.layers) or "output" in position:
        raise FileError(f'{where}: layers: names must be unique, and none may be "output"')
    if list(sizes) != sorted(set(sizes)):
        raise FileError(f"{where}: micro_batch_sizes: must rise")
    for layer in profile.layers:
        _check_sizes(f"{where}: layer {layer.name!r}", layer.measurements, sizes)
        for part, of in (("matrix_bytes", "parameter_bytes"), ("frozen_bytes", "buffer_bytes")):
            if (getattr(layer, part) or 0) > getattr(layer, of):
                raise FileError(f"{where}: layer {layer.name!r}: more {part} than {of}")
        for name in (*layer.saves, *(layer.changes or ())):
            if name not in storages:
                does = "saves" if name in layer.saves else "changes"
                raise FileError(f"{where}: layer {layer.name!r} {does} unknown storage {name!r}")
    if profile.loss:
        _check_sizes(f"{where}: loss", profile.loss, sizes)
    _check_kinds(profile, where)
    for edge in profile.edges:
        for end in (edge.producer, edge.consumer):
            if end not in position and not (end == "output" and end == edge.consumer):
                raise FileError(f"{where}: edge of {edge.tensor!r} names unknown layer {end!r}")
        if edge.storage not in storages:
            raise FileError(f"{where}: edge of {edge.tensor!r}: unknown storage {edge.storage!r}")
        if edge.consumer != "output" and position[edge.producer] >= position[edge.consumer]:
            raise FileError(
                f"{where}: edge {edge.producer!r} → {edge.consumer!r}: layers must be listed "
                "in topological order"
            )
    named = [
        *(
            (f"input {source.name!r} names", [*filter("output".__ne__, source.consumers)])
            for source in profile.inputs
        ),
        *(("tied:", group) for group in profile.tied),
        *(("shared_frozen:", shared.layers) for shared in profile.shared_frozen or ()),
    ]
    for what, names in named:
        for name in names:
            if name not in position:
                raise FileError(f"{where}: {what} unknown layer {name!r}")
    check_varying(profile.varying, where)
    groups = {frozenset(group) for group in profile.tied}
    for shared in profile.shared:
        if frozenset(shared.layers) not in groups:
            shown = ", ".join(map(repr, shared.layers))
            raise FileError(f"{where}: shared: {shown} aren't a group of `tied`")
    return profile


def check_varying(varying: VaryingShapes | msgspec.UnsetType, where: str) -> None:
    """Raise FileError where shapes that vary contradict each other."""
    if varying is msgspec.UNSET:
        return
    every = (varying.least, varying.profiled, varying.most)
    if len({tuple(map(len, shapes)) for shapes in every}) > 1 or any(
        not a <= b <= c
        for shapes in zip(*every, strict=True)
        for a, b, c in zip(*shapes, strict=True)
    ):
        raise FileError(f"{where}: varying: each size of `profiled` must be from `least` to `most`")


def made_of(profile: Profile | ProfileReference) -> str:
    """What a profile without a model was made of: it can be planned, but not run. Empty for one of
    a model."""
    name = profile.front_end
    if name in IMPORTED or profile.device == ELSEWHERE:
        return IMPORTED.get(name, f"numbers ({name})")
    return ""


def check_front_end(profile: Profile | ProfileReference, where: str) -> None:
    """Raise FileError where a profile of a model names no front end."""
    if profile.front_end in FRONT_ENDS or made_of(profile):
        return
    known = (*front_ends(), *IMPORTED)
    if profile.front_end not in known:
        found = f"{profile.front_end!r} isn't one of {', '.join(known)}"
        raise FileError(f"{where}: front_end: {found}")


def front_ends() -> tuple[str, ...]:
    """All that there are."""
    return (*FRONT_ENDS, *plugins.names("front_ends"))


def front_end_called(name: str) -> str:
    """What messages call a front end."""
    return FRONT_ENDS.get(name, f"the front end {name}")


def _check_kinds(profile: Profile, where: str) -> None:
    kinds = profile.kinds or ()
    shape = [len(profile.micro_batch_sizes)] * len(profile.layers)
    for kind in kinds:
        if any([len(of) for of in times] != shape for times in (kind.forward_s, kind.backward_s)):
            raise FileError(f"{where}: kinds: {kind.name}: give seconds of each layer and size")
    if len({kind.name for kind in kinds}) < len(kinds):
        raise FileError(f"{where}: kinds: names must be unique")
    own = any(layer.update_s is not msgspec.UNSET for layer in profile.layers)
    if kinds and (profile.loss or profile.operation or profile.together or own):
        what = "loss, operation, together and update_s"
        raise FileError(f"{where}: kinds: {what} are of one kind of device; leave them out")


def _check_sizes(where: str, measurements: tuple[Measurement, ...], sizes: tuple[int, ...]) -> None:
    if tuple(m.micro_batch for m in measurements) != sizes:
        raise FileError(f"{where}: measurements must be given for micro-batch sizes {list(sizes)}")
    for m in measurements:
        shortest = min((t for t in (m.forward_s, m.backward_s) if t), default=1.0)
        if shortest < MIN_SECONDS:
            raise FileError(f"{where}: forward_s, backward_s: {shortest} s is too short to be true")
