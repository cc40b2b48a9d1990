"""From a model to a graph of layers: the front ends, tried in order, and two small ones."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import getitem
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import plugins
from ..errors import TargetError, TaskWarning, TimeprestError, TraceError, is_users
from ..profile import FRONT_ENDS, front_end_called
from .call import Call, settle, unchanged
from .export import trace_export
from .fx import homes, modules_called, trace_fx
from .graph import GraphBody, TracedModel
from .layers import LAYER, OP, check_granularity, group, matches, without_effect
from .random_states import own_states, same_own_states, same_states, states
from .shapes import specs_and_result
from .verify import RunResult, compare, run

# Front end: the children of an nn.Sequential, each called as a whole; nothing is traced ---------


def trace_sequential(model: nn.Module, call: Call, granularity: str) -> TracedModel:
    """A chain of the children; nested nn.Sequentials are opened. Raises TraceError: not an
    nn.Sequential with one input, or a child gives something that can't go to the next one."""
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise TraceError("is not an nn.Sequential")
    if len(call.tensors) != 1 or call.nests is not None:
        raise TraceError(f"an nn.Sequential takes one tensor, not {len(call.tensors)}")
    graph = fx.Graph()
    value: Any = graph.placeholder("input")
    at_hand: Any = call.tensors[0]
    with torch.no_grad():
        for path, child in _children(model, ""):
            node = graph.call_module(path, (value,))
            node.meta["nn_module_stack"] = {path: (path, type(child))}
            at_hand = child(at_hand)
            value = _unpacked(graph, node, at_hand, path)
    graph.output(value)
    layers = group(graph, granularity, homes, model)
    return TracedModel(GraphBody(model, graph), layers, "sequential", granularity)


def _children(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if type(child) is nn.Sequential:
            yield from _children(child, f"{path}.")
        else:
            yield path, child


def _unpacked(graph: fx.Graph, node: fx.Node, value: Any, path: str) -> Any:
    """What the next child takes, tuples and dicts taken apart: only tensors cross a cut."""
    if isinstance(value, Tensor):
        return node
    if type(value) in (tuple, list) and all(isinstance(v, Tensor) for v in value):
        return type(value)(graph.call_function(getitem, (node, k)) for k in range(len(value)))
    if type(value) is dict and all(isinstance(v, Tensor) for v in value.values()):
        return {key: graph.call_function(getitem, (node, key)) for key in value}
    raise TraceError(
        f"child {path!r} of the nn.Sequential gives a {type(value).__name__}: between children "
        "only tensors, and tuples, lists or dicts of tensors, can go"
    )


# All front ends, tried in order -----------------------------------------------------------------

TRACE_SAMPLES = 2
"""Samples in the batch that a model is traced with; torch.export would take a 1 for fixed."""

_ADVICE = re.compile(
    r"For more information|If you're using|\(unhinted|Caused by|To help you debug|"
    r"The following call|User Stack|Potential framework code"
)
_MAX_REASON = 200

STATIC = "export-static"
_ORDER = ("fx", "export", STATIC, "sequential")

_TRACERS: dict[str, Callable[[nn.Module, Call, str], TracedModel]] = {
    "fx": trace_fx,
    "export": lambda *arguments: trace_export(*arguments, free_batch=True),
    "export-static": lambda *arguments: trace_export(*arguments, free_batch=False),
    "sequential": trace_sequential,
}


OWN_FRONT_END = "timeprest.front_end"
"""In the `meta` of an fx.GraphModule that a plugin imported: the one front end that it is for."""


def tracer_of(front_end: str) -> Callable[[nn.Module, Call, str], TracedModel]:
    """A front end's function. Raises PluginError for one of a plugin that isn't there."""
    own = _TRACERS.get(front_end)
    found: Callable[..., TracedModel] = own or plugins.load("front_ends", front_end)
    return found


def trace(
    model: nn.Module,
    target: str,
    call: Call,
    *,
    front_end: str | None = None,
    granularity: str = LAYER,
    verify: bool = True,
) -> TracedModel:
    """Find the graph of a model's layers.

    Args:
        call: inputs of a small batch.
        front_end: take this one (profile.FRONT_ENDS) instead of trying them in order.
        granularity: what makes a layer (layers.py).
        verify: hold the graph's results, gradients and buffers against the model's own on `call`
            (verify.py); a front end whose graph does something else is passed over.

    Raises:
        TargetError: the model itself fails on `call`.
        TraceError: no front end takes the model. The message names the line of the user's code
            that the one which got furthest failed at, why each one refused, and patterns of names
            with which one doesn't.
    """
    check_granularity(model, granularity)
    if front_end is None and isinstance(model, fx.GraphModule):
        front_end = model.meta.get(OWN_FRONT_END)
    order: Sequence[str] = (front_end,) if front_end else _ORDER
    if call.varying is not None:
        # A graph of one shape is of no use.
        order = tuple(name for name in order if name != STATIC)
        if not order:
            raise TraceError(
                f"{target}: mini-batches differ in shape, and {FRONT_ENDS[STATIC]} takes one: "
                f"leave out --front-end {STATIC}, or have the data fill them up to one shape"
            )
    # What the model itself gives, for the same random numbers.
    with _own_failures(model, target):
        wanted = run(model, model, call) if verify else None
    failures: list[_Failure] = []
    # Who names the front end took its graph before.
    crosses = verify or front_end is None
    for name in order:
        traced, left = _attempt(model, call, name, granularity, wanted, failures, crosses=crosses)
        if traced is None:
            continue
        # In evaluation mode it has been said of training.
        if left and model.training:
            _warn_of_counts(target, left)
        if not traced.layers:
            raise TraceError(
                f"{target}: the traced model has no operation; there is nothing to cut"
            )
        for pattern in without_effect(traced.layers, granularity) if verify else ():
            warnings.warn(
                f"{target}: --granularity {pattern!r} changes nothing: no module that it matches "
                "is called by itself (it is inside one that is a layer as a whole, or only its "
                "weights are used)",
                TaskWarning,
                stacklevel=2,
            )
        told = tuple(f"{front_end_called(failure.name)}: {failure.reason}" for failure in failures)
        return replace(traced, refusals=told)
    if front_end is None and not isinstance(model, nn.Sequential):
        failures = [failure for failure in failures if failure.name != "sequential"]
    whole = _kept_whole(model, call, granularity, wanted, failures) if verify else None
    # Of several that got as far, the first: `max` takes that.
    furthest = max(failures, key=lambda failure: failure.reached)
    raise TraceError(_explain(model, target, furthest, failures, whole)) from furthest.error


def trace_alike(traced: TracedModel, model: nn.Module, target: str, call: Call) -> TracedModel:
    """The graph for another call, or mode, by the front end of a graph that there is; nothing is
    held against the model. Raises as `trace`."""
    name, granularity = traced.front_end, traced.granularity
    return trace(model, target, call, front_end=name, granularity=granularity, verify=False)


@dataclass(frozen=True)
class _Failure:
    """Why a front end doesn't take a model.

    Attributes:
        reached: how far it got, to be compared: whether to a graph, which does something else than
            the model or can't be cut; and if not, through how many of the model's modules.
    """

    name: str
    error: Exception
    reached: tuple[bool, int]

    @property
    def reason(self) -> str:
        return _reason(self.error)


def _attempt(
    model: nn.Module,
    call: Call,
    name: str,
    granularity: str,
    wanted: RunResult | None,
    failures: list[_Failure],
    *,
    crosses: bool = True,
) -> tuple[TracedModel | None, list[str]]:
    """The graph that a front end makes, and what of the model's attributes it doesn't count in;
    None where it doesn't take the model, with the failure added. `wanted`: what the model does on
    `call`, if that is held against it. `crosses`: look whether what goes from layer to layer can.
    """
    traced, left = None, list[str]()
    with modules_called() as called:
        try:
            # What the forward warns of, it has when the model itself was called.
            with unchanged(model), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # Fresh tensors: torch.export leaves marks on those that it is given.
                fresh = call.with_tensors([t.clone() for t in call.tensors])
                # Evaluation has no gradients, which a forward may ask for.
                learns = torch.is_grad_enabled() and model.training
                with torch.set_grad_enabled(learns), _without_random_numbers(name, model):
                    traced = tracer_of(name)(model, fresh, granularity)
            if wanted is not None:
                left = compare(model, traced.module, call, wanted)
                learns = wanted.gradients is not None
            if crosses:  # some forwards take gradients inside
                with torch.set_grad_enabled(learns):
                    specs_and_result(traced, call.tensors, fake=False)
        except Exception as error:  # the user's forward runs here: anything may come out
            failures.append(_Failure(name, error, (traced is not None, len(called))))
            traced = None
    return traced, left


_MOST_PATTERNS = 4


def _kept_whole(
    model: nn.Module,
    call: Call,
    granularity: str,
    wanted: RunResult | None,
    failures: list[_Failure],
) -> str | None:
    """Patterns of modules' names with which a front end takes the model: tried, not guessed. Where
    torch.fx's failure without them happened says which modules to try."""
    patterns = [] if granularity in (LAYER, OP) else [granularity]
    for _ in range(_MOST_PATTERNS):
        # What keeps modules whole.
        failure = next((failure for failure in failures if failure.name == "fx"), None)
        path = _module_around(model, failure.error, patterns) if failure is not None else None
        if path is None:
            return None
        # Its siblings in a list are alike.
        patterns.append(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        failures = []
        traced, _ = _attempt(model, call, "fx", ",".join(patterns), wanted, failures)
        if traced is not None:
            # Of one layer nothing is gained.
            return ",".join(patterns) if len(traced.layers) > 1 else None
    return None


def _module_around(model: nn.Module, error: Exception, patterns: Sequence[str]) -> str | None:
    """The innermost module that an error comes out of, if there is one in the model that isn't
    kept whole by these patterns yet."""
    paths = {id(module): path for path, module in model.named_modules() if path}
    found: str | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = paths.get(id(frame.f_locals.get("self")))
        if path is not None and not isinstance(frame.f_locals["self"], nn.Sequential):
            found = path
    if found is None or matches(found, ",".join(patterns)):
        return None
    return found


def first_forward(model: nn.Module, target: str, call: Call, *, fake: bool = False) -> None:
    """`settle` the model; arguments and errors as there, and TargetError where the model fails."""
    with _own_failures(model, target):
        settle(model, call, target, fake=fake)


@contextmanager
def _own_failures(model: nn.Module, target: str) -> Iterator[None]:
    try:
        yield
    except TraceError as error:
        raise TraceError(f"{target}: {error}") from error
    except TimeprestError:
        raise
    except Exception as error:  # the user's forward runs here
        where = _where(model, target, error)
        raise TargetError(
            f"{where}: the model failed on its own inputs: {_reason(error)}"
        ) from error


def _warn_of_counts(target: str, names: Sequence[str]) -> None:
    warnings.warn(
        f"{target}: a forward changes {shorten(', '.join(names), 120, placeholder=' …')}, which "
        "the layers' graph keeps as it was when it was traced: should results, or a loss, come to "
        "hang on it (a warm-up counted in calls, a state carried on), they won't; keep it in a "
        "buffer, or return it",
        TaskWarning,
        stacklevel=3,
    )


def check_other(model: nn.Module, target: str, traced: TracedModel, call: Call) -> None:
    """Check that a graph holds for inputs of other shapes than it was made with.

    Raises TraceError.
    """
    try:
        compare(model, traced.module, call, run(model, model, call))
    except Exception as error:  # the user's forward runs here
        shapes = ", ".join(str(list(tensor.shape)) for tensor in call.tensors)
        raise TraceError(
            f"{target}: mini-batches differ in shape, and the graph of the model doesn't hold for "
            f"inputs of {shapes}: {_reason(error)}. Have its forward take sizes from its inputs, "
            "or the data fill mini-batches up to one shape"
        ) from error


@contextmanager
def _without_random_numbers(name: str, model: nn.Module) -> Iterator[None]:
    """Raise TraceError where random numbers are drawn: what is made of them would stay so for good.

    torch.export makes operations of torch's own; the children of an nn.Sequential draw anew.
    """
    before, own = states(), own_states(model.modules())
    yield
    after = states()
    if name != "fx":
        after = (before[0], *after[1:])
    same = same_states(before, after) and same_own_states(own)
    if name != "sequential" and not same:
        raise TraceError(
            "the forward draws random numbers that no operation of the graph is (random.random(), "
            "torch.rand(1).item(), …): each mini-batch would have those of the trace"
        )


def _reason(error: Exception) -> str:
    """The gist of an error: torch's go on with advice for their own callers."""
    text = " ".join(str(error).split())
    if "Constraints violated" in text:
        return (
            "the forward fixes the batch size, or another that varies (int(x.shape[0]), a loop "
            "over samples, or so)"
        )
    text = _ADVICE.split(text)[0].strip().rstrip(".! ")
    if len(text) > _MAX_REASON:
        text = text[:_MAX_REASON].rsplit(" ", 1)[0] + " …"
    return text or type(error).__name__


def _where(model: nn.Module, target: str, failure: Exception) -> str:
    """The line of the user's code that a failure came from, else the model."""
    for error in (failure, failure.__cause__):
        found = traceback.extract_tb(error.__traceback__) if error is not None else []
        if isinstance(error, TraceError):  # a front end's own file, ONNX's or a plugin's, raised it
            found = found[:-1]
        frames = [frame for frame in found if is_users(frame.filename, models=True)]
        if frames:
            return f"{frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`"
    return f"{target} ({type(model).__name__}.forward)"


def _explain(
    model: nn.Module,
    target: str,
    furthest: _Failure,
    failures: Sequence[_Failure],
    whole: str | None,
) -> str:
    where = _where(model, target, furthest.error)
    whose: dict[str, list[str]] = {}
    for failure in (furthest, *failures):
        names = whose.setdefault(failure.reason, [])
        if front_end_called(failure.name) not in names:
            names.append(front_end_called(failure.name))
    told = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in whose.items())
    keep = (
        f"keep that part whole with --granularity {whole!r}"
        if whole
        else "have that part in a module of its own and keep it whole with --granularity NAME"
    )
    return (
        f"{where}: no front end takes this ({told}). Make the forward independent "
        f"of tensor values (no `if`, loop or Python conversion on them), {keep}, or make the model "
        "an nn.Sequential of such parts"
    )
