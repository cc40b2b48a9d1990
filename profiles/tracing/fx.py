"""Front end: torch.fx symbolic tracing. Keeps modules whole, takes any batch size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from types import BuiltinMethodType
from typing import Any

import torch
from torch import _C, Tensor, fx, nn
from torch.autograd import Function
from torch.autograd.function import _SingleLevelFunction
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointFunction

from ..errors import TraceError
from .call import Call
from .graph import GraphBody, TracedModel, fetch_attribute
from .layers import NETWORKS, Home, group, matches, without_gradient
from .remembered import summed


class _Tracer(fx.Tracer):
    """Traces a call with exactly the arguments given; the others keep their defaults."""

    proxy_buffer_attributes = True
    """What is computed of buffers alone is computed anew each time: they change, if only in the
    other mode."""

    def __init__(self, call: Call, granularity: str) -> None:
        super().__init__()
        self.call = call
        self.granularity = granularity

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole: bool = super().is_leaf_module(m, module_qualified_name)
        whole = whole and not isinstance(m, NETWORKS)
        return whole or matches(module_qualified_name, self.granularity)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.is_leaf_module(m, self.path_of_module(m)):
            for called in _called:
                called.update(map(id, m.modules()))
        return super().call_module(m, forward, args, kwargs)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        own = list(inspect.signature(inspect.unwrap(root_fn)).parameters)[1:]
        proxies = [
            self.create_proxy("placeholder", label, (), {}) for label in self.call.labels(own)
        ]
        positional, named = self.call.arguments(proxies)

        def call(*args: Any) -> Any:
            return root_fn(*args, **named)

        return call, [self.root, *positional]

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        """Trace, knowing what is switched on outside."""
        self.modes = _modes()
        with functions_called(self._operation, root), transformers_opened():
            return super().trace(root, concrete_args)

    def _operation(self, function: type[Function], arguments: Sequence[Any]) -> Any:
        """A custom Function as one operation: its forward says nothing of its backward."""
        if not any(isinstance(argument, fx.Proxy) for argument in arguments):
            return NotImplemented
        bound = tuple(
            (k, argument)
            for k, argument in enumerate(arguments)
            if callable(argument) and not isinstance(argument, (fx.Proxy, nn.Module))
        )
        others = [k for k in range(len(arguments)) if k not in dict(bound)]
        given = tuple(arguments[k] for k in others)
        return self.create_proxy("call_function", applied(function, bound), given, {})

    def create_proxy(self, kind: str, *details: Any, **more: Any) -> fx.Proxy:
        """Add an operation. Raises TraceError where it runs in a mode that graphs don't have."""
        proxy: fx.Proxy = super().create_proxy(kind, *details, **more)
        grad, *others = _modes()
        if others != list(self.modes[1:]):
            raise TraceError(
                "the forward switches torch.autocast or torch.inference_mode, which symbolic "
                "tracing can't see"
            )
        if grad or not self.modes[0] or not kind.startswith("call_"):
            return proxy
        behind = super().create_proxy("call_function", without_gradient, (proxy,), {})
        # Evaluation cuts nothing off, and has the same names.
        proxy.node.name, behind.node.name = behind.node.name, proxy.node.name
        return behind


_called: list[set[int]] = []


@contextmanager
def modules_called() -> Iterator[set[int]]:
    """While it lasts, the ids of modules that are called, by whichever front end."""
    called: set[int] = set()
    hook = register_module_forward_pre_hook(lambda module, _: called.add(id(module)))
    _called.append(called)
    try:
        yield called
    finally:
        _called.remove(called)
        hook.remove()


# Transformers of torch.nn: what their forwards do, without looking at shapes and masks. Masks go to
# the attention as they are, which takes them in all their forms. Hints that one is causal are left
# out unless given: they say nothing that the mask doesn't.


def _masks(kind: type[nn.Module], rest: Iterable[Any], named: dict[str, Any]) -> dict[str, Any]:
    """By name, what a forward of two sequences is given besides these."""
    return dict(zip(_BEHIND_SEQUENCES[kind], rest, strict=False)) | named


_BEHIND_SEQUENCES: dict[type[nn.Module], list[str]] = {
    kind: list(inspect.signature(kind.forward).parameters)[3:]
    for kind in (nn.Transformer, nn.TransformerDecoder)
}


@wraps(nn.Transformer.forward)
def _transformer(self: nn.Transformer, src: Any, tgt: Any, *rest: Any, **named: Any) -> Any:
    masks = _masks(nn.Transformer, rest, named)
    memory = self.encoder(
        src,
        mask=masks.pop("src_mask", None),
        src_key_padding_mask=masks.pop("src_key_padding_mask", None),
        is_causal=masks.pop("src_is_causal", None),
    )
    return self.decoder(tgt, memory, **masks)


def _encoder(
    self: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    output = src
    for layer in self.layers:
        output = layer(
            output,
            src_mask=mask,
            is_causal=bool(is_causal),
            src_key_padding_mask=src_key_padding_mask,
        )
    if src_key_padding_mask is not None and mask is None and _nests(self):
        # What evaluating in nested tensors leaves of padding.
        padded = src_key_padding_mask != 0
        if getattr(self, "mask_check", True):
            padded = padded & (padded[:, 1:] >= padded[:, :-1]).all()
        output = output.masked_fill(padded.unsqueeze(-1), 0.0)
    return output if self.norm is None else self.norm(output)


def _nests(encoder: nn.TransformerEncoder) -> bool:
    """Whether it evaluates mini-batches that are padded at the ends without their padding."""
    enabled = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
    first = encoder.layers[0]
    return enabled and not first.training and bool(getattr(encoder, "use_nested_tensor", False))


def _encoder_layer(
    self: nn.TransformerEncoderLayer,
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool = False,
) -> Any:
    masks = (src_mask, src_key_padding_mask)
    if self.norm_first:
        x = src + self._sa_block(self.norm1(src), *masks, is_causal=is_causal)
        return x + self._ff_block(self.norm2(x))
    x = self.norm1(src + self._sa_block(src, *masks, is_causal=is_causal))
    return self.norm2(x + self._ff_block(x))


@wraps(nn.TransformerDecoder.forward)
def _decoder(self: nn.TransformerDecoder, tgt: Any, memory: Any, *rest: Any, **named: Any) -> Any:
    masks, output = _masks(nn.TransformerDecoder, rest, named), tgt
    masks["tgt_is_causal"] = bool(masks.get("tgt_is_causal"))
    for layer in self.layers:
        output = layer(output, memory, **masks)
    return output if self.norm is None else self.norm(output)


_OPENED: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Transformer: _transformer,
    nn.TransformerEncoder: _encoder,
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerDecoder: _decoder,
}


@contextmanager
def transformers_opened() -> Iterator[None]:
    """While it lasts, have torch's Transformers do what a graph can hold."""
    before = {kind: kind.forward for kind in _OPENED}
    try:
        for kind, forward in _OPENED.items():
            kind.forward = forward
        yield
    finally:
        for kind, forward in before.items():
            kind.forward = forward


def _modes() -> tuple[int, ...]:
    """What a forward may switch for some of its operations."""
    # Within how many: one that switches autocast off shows where a run is under autocast.
    nested = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    autocast = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), nested, *autocast)


@cache
def applied(
    function: type[Function], bound: tuple[tuple[int, Callable[..., Any]], ...] = ()
) -> Callable[..., Any]:
    """What applies a custom Function, under its name, with arguments that are functions, which no
    graph holds, bound by position."""

    def apply(*arguments: Any) -> Any:
        given = list(arguments)
        for k, argument in bound:
            given.insert(k, argument)
        return function.apply(*given)

    apply.__name__, apply.__qualname__ = function.__name__, function.__qualname__
    apply.__module__ = "autograd"
    return apply


_APPLY = _C._FunctionBase.__dict__["apply"]
"""Of custom Functions, below what they have in Python."""


@contextmanager
def functions_called(
    call: Callable[[type[Function], Sequence[Any]], Any] = lambda *_: NotImplemented,
    model: nn.Module | None = None,
) -> Iterator[None]:
    """While it lasts, have `call` do what `Function.apply` does, unless it gives NotImplemented;
    also where the modules of the model's classes have another name for it.

    What torch.utils.checkpoint would compute again is simply called: a plan says what a stage
    computes again, and has no use for a graph without the gradients of its parameters.
    """

    def apply(function: type[Function], *arguments: Any, **named: Any) -> Any:
        if function is CheckpointFunction:
            run, _, *inputs = arguments
            return run(*inputs)
        found = NotImplemented if named else call(function, arguments)
        if found is not NotImplemented:
            return found
        return _APPLY.__get__(None, function)(*arguments, **named)

    before = Function.__dict__["apply"]
    names = [*_named(model)] if model is not None else []
    # Up to torch 2.13 that calls what is below it, whatever it is called.
    below = _SingleLevelFunction if isinstance(before, classmethod) else Function
    below.apply = classmethod(apply)  # type: ignore[attr-defined]
    for scope, name, bound in names:
        scope[name] = partial(apply, bound.__self__)
    try:
        yield
    finally:
        for scope, name, bound in names:
            scope[name] = bound
        if below is Function:
            Function.apply = before  # type: ignore[method-assign]
        else:
            del _SingleLevelFunction.apply  # type: ignore[attr-defined]


def _named(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Global names, f = MyFunction.apply, that methods of a model's classes may call it by."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    methods = (method for kind in kinds for method in vars(kind).values())
    scopes = {id(m.__globals__): m.__globals__ for m in methods if inspect.isfunction(m)}
    for scope in scopes.values():
        for name, value in scope.items():
            of = getattr(value, "__self__", None) if isinstance(value, BuiltinMethodType) else None
            if isinstance(of, type) and issubclass(of, Function) and value.__name__ == "apply":
                yield scope, name, value


def homes(node: fx.Node) -> list[Home]:
    """The module calls around a node, as the tracer noted them."""
    stack = node.meta.get("nn_module_stack") or {}
    return [Home(path, kind.__name__, call) for call, (path, kind) in stack.items()]


def _seen(p: nn.Parameter) -> tuple[Any, ...]:
    """What shows that a parameter was written; `p.data` has no version of its own."""
    if p.is_meta or type(p) is not nn.Parameter:
        return ()
    return p.data_ptr(), p._version, summed(p)


def trace_fx(model: nn.Module, call: Call, granularity: str) -> TracedModel:
    """Trace `model` symbolically. Raises whatever the user's forward raises on proxies."""
    before = {name: _seen(p) for name, p in model.named_parameters()}
    graph = _Tracer(call, granularity).trace(model)
    for name, p in model.named_parameters():
        if _seen(p) != before.get(name):
            raise TraceError(
                f"the forward writes into parameter {name!r} in a way that the graph wouldn't "
                "(from a list of parameters, as in a loop over parameters())"
            )
    for node in graph.nodes:
        made = fetch_attribute(model, str(node.target)) if node.op == "get_attr" else None
        if isinstance(made, Tensor) and made.requires_grad and not isinstance(made, nn.Parameter):
            raise TraceError(
                "the forward reaches parameters by a list of them (parameters(), [layer.weight]): "
                "what it makes of them would stay what it is now"
            )
    module = GraphBody(model, graph)
    layers = group(graph, granularity, homes, model)
    return TracedModel(module, layers, "fx", granularity)
