"""Graphs held against their models: gradients, buffers and random numbers; what is refused."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from timeprest.profiles.errors import TaskWarning, TraceError
from timeprest.profiles.tracing.call import Call, mark_of, unchanged
from timeprest.profiles.tracing.front_ends import trace
from timeprest.profiles.tracing.graph import fingerprint
from timeprest.profiles.tracing.random_states import own_states, same_own_states
from timeprest.profiles.tracing.verify import _moved, compare, run
from torch import _C, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint


class Reversed(torch.autograd.Function):
    """Another gradient than that of its forward."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.by * gradient, None


class Halves(torch.autograd.Function):
    """Two results."""

    @staticmethod
    def forward(ctx, x):
        return x / 2, x.sin()

    @staticmethod
    def backward(ctx, one, other):
        return one + 3 * other


class Shaped(torch.autograd.Function):
    """Given a function, which no graph holds."""

    @staticmethod
    def forward(ctx, x, shape, by):
        ctx.by = by
        return shape(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.by * gradient, None, None


class Reversible(torch.autograd.Function):
    """Computes a function again in its backward, which gives that's parameters their gradients."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.function(x).backward(gradient)
        return x.grad, None


def mersenne(seed):
    return np.random.Generator(np.random.MT19937(seed))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


turned = Reversed.apply
# As torch 2.14 and later bind it.
bound = _C._FunctionBase.__dict__["apply"].__get__(None, Reversed)
"""As PyTorch's tutorials call a Function."""


class Base(nn.Module):
    """Two linear layers and what is between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6))

    def between(self, h):
        return h

    def forward(self, x):
        return self.b(self.between(torch.tanh(self.a(x)))).relu()


class OwnBackward(Base):
    def between(self, h):
        return Reversed.apply(h, 0.5)


class TwoResults(Base):
    def between(self, h):
        one, other = Halves.apply(h)
        return one * other


class ByAnotherName(Base):
    def between(self, h):
        return turned(h, 0.5)


class ByABoundName(Base):
    def between(self, h):
        return bound(h, 0.5)


class WithAFunction(Base):
    def between(self, h):
        return Shaped.apply(h, torch.tanh, 2.0)


class GivenAModule(Base):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(6, 6)

    def between(self, h):
        return Reversible.apply(h, self.inside)


class GivenItsForward(GivenAModule):
    def between(self, h):
        return Reversible.apply(h, self.inside.forward)


class ByAList(Base):
    """Parameters that are reached by another way than their names."""

    def between(self, h):
        return h + sum(p.square().sum() for p in self.a.parameters())


class ByAFlatTensor(Base):
    """Parameters that lie in one tensor, which is no parameter."""

    def __init__(self):
        super().__init__()
        self.flat = nn.utils.parameters_to_vector(self.b.parameters()).detach()
        nn.utils.vector_to_parameters(self.flat, self.b.parameters())

    def between(self, h):
        return h + self.flat.mean()


class DetachedByAList(Base):
    def between(self, h):
        return h / sum(p.detach().norm() for p in self.a.parameters())


class NumberOfAList(Base):
    def between(self, h):
        return h / max(float(p.abs().max()) for p in self.a.parameters())


class SparseBuffers(Base):
    """Of which no copy is made into them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("near", torch.eye(6).to_sparse())
        self.register_buffer("one", torch.ones(1).expand(6))

    def between(self, h):
        return torch.sparse.mm(self.near, h.T).T * self.one


class ZeroHead(Base):
    """At its first weights no gradient comes back but the head's own."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 2)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(super().forward(x))

    def between(self, h):
        h = h * 1
        if h.requires_grad:
            h.register_hook(lambda gradient: -gradient)
        return h


class Remembers(Base):
    """A tensor, which is none where it is traced, and how often it was called."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def between(self, h):
        self.last, self.calls = h, self.calls + 1
        return h


class Drawn(nn.Module):
    def forward(self, x):
        return x * random.choice([1.0, 2.0]) if bool(x.sum() < 1e6) else x


class Checkpointed(Base):
    def between(self, h):
        return checkpoint(self.b, h, use_reentrant=True) + h


class NoGradient(Base):
    def between(self, h):
        with torch.no_grad():
            scale = self.b(h).sigmoid()
        return h * scale


class WithoutAutocast(Base):
    """Where nothing is under autocast, nothing of it shows."""

    def between(self, h):
        with torch.autocast("cpu", enabled=False):
            return self.b(h.float())


class Hooked(Base):
    def between(self, h):
        h = h * 1
        if h.requires_grad:
            h.register_hook(lambda gradient: 0.1 * gradient)
        return h


class Normed(Base):
    """A layer norm's weights are all one number; the gradient is a little too small."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def between(self, h):
        h = self.norm(h)
        if h.requires_grad:
            h.register_hook(lambda gradient: 0.7 * gradient)
        return h


class HookedModule(Base):
    def __init__(self):
        super().__init__()
        self.c = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.c.register_full_backward_hook(lambda module, given, out: tuple(g / 10 for g in given))

    def between(self, h):
        return self.c(h)


class ClampedInPlace(Base):
    def between(self, h):
        h = h - 0.1
        with torch.no_grad():
            h.clamp_(min=0)
        return h + 1


class Counts(Base):
    def between(self, h):
        self.steps += 1
        return h


class CountsCalls(Base):
    """In an attribute, on which something hangs that no look sees."""

    calls = 0

    def between(self, h):
        self.calls = self.calls + 1
        return h * 0 if self.calls > 1000 else h


class Teaches(Base):
    """A teacher that follows its student, in a loop over their parameters."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(4, 6)
        self.teacher.load_state_dict(self.a.state_dict())

    def forward(self, x):
        for own, new in zip(self.teacher.parameters(), self.a.parameters(), strict=True):
            own.data = own.data * 0.99 + new.data * 0.01
        return self.b(torch.tanh(self.a(x)) + self.teacher(x).detach())


class Decays(Base):
    def between(self, h):
        self.b.weight.data.mul_(0.5)
        return h


class CarriesOn(Base):
    def __init__(self):
        super().__init__()
        self.state = None

    def between(self, h):
        before, self.state = self.state, h.detach().mean()
        return h if before is None else h + 0 * before


class Carries(Base):
    """The state of the call before, in whatever holds it: the result hangs on it."""

    def __init__(self, pack=tuple, unpack=list):
        super().__init__()
        self.pack, self.unpack = (pack,), (unpack,)
        self.kept = None

    def between(self, h):
        for before in () if self.kept is None else self.unpack[0](self.kept):
            h = h + before
        self.kept = self.pack[0]([h.detach().mean(), h.detach().amax()])
        return h


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


class TuplesOwn(tuple):
    """A class of the user's."""


@dataclass
class Record:
    pair: tuple


class Slotted:
    __slots__ = ("pair",)

    def __init__(self, pair):
        self.pair = pair


class CarriesInAnotherModule(Carries):
    """Which is a module's attribute by the way, without being its own."""

    def between(self, h):
        self.kept = getattr(self.a, "before", None)
        h = super().between(h)
        self.a.before = self.kept
        return h


class CarriesInAClass(Base):
    box: ClassVar[dict] = {}

    def between(self, h):
        h, CarriesInAClass.box["h"] = h + CarriesInAClass.box.get("h", 0), h.detach().mean()
        return h


AROUND = []


class CarriesAround(Base):
    """In a list of the file."""

    def between(self, h):
        h = h + sum(AROUND)
        AROUND[:] = [h.detach().mean()]
        return h


class CarriesByAHook(Base):
    """In a dict that its hook alone knows."""

    def __init__(self):
        super().__init__()
        kept = {}

        def carry(module, given, output):
            found, kept["h"] = output + kept.get("h", 0), output.detach().mean()
            return found

        self.a.register_forward_hook(carry)


class Penalized(Base):
    """For a loss that adds it."""

    penalty = 0.0

    def between(self, h):
        self.penalty = h.pow(2).mean()
        return h


class Collects(Base):
    def __init__(self):
        super().__init__()
        self.seen, self.by_name = [], {}

    def between(self, h):
        self.seen.append(1)
        self.by_name["calls"] = self.by_name.get("calls", 0) + 1
        return h


class Averages(Base):
    def between(self, h):
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return h - self.mean


class AveragesAnew(Base):
    def between(self, h):
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class OwnNorm(Base):
    """Evaluation reads what training has left in a buffer, and does nothing else with it."""

    def between(self, h):
        if self.training:
            self.mean.lerp_(h.detach().mean(0), 0.1)
        return h / torch.sqrt(1 + self.mean.square())


class Skips(Base):
    """Seldom: a look at what it gives would find nothing."""

    def between(self, h):
        return h * 0 if self.training and torch.rand(1).item() < 1e-6 else h


class SkipsByPython(Base):
    def between(self, h):
        return h * 0 if self.training and random.random() < 1e-6 else h


class OwnGenerator(Base):
    """Of a module's own, seeded apart."""

    def __init__(self, make=random.Random):
        super().__init__()
        self.generator = make(3)

    def between(self, h):
        if isinstance(self.generator, torch.Generator):
            return h * torch.rand(6, generator=self.generator)
        return h * (0 if self.generator.random() < 1e-6 else 1)


class NoiseOfItsOwn(Base):
    def between(self, h):
        return h + torch.randn(6)


class Rounded(nn.Module):
    """The gradient of the key's bias is of rounding errors alone."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        h = x.reshape(x.shape[0], 2, 2).repeat(1, 1, 4)
        return self.attention(h, h, h)[0]


def call_of(samples=2):
    torch.manual_seed(1)
    return Call((torch.randn(samples, 4),), (None,))


def build(make):
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize(
    ("make", "front_end"),
    [
        (OwnBackward, "fx"),
        (TwoResults, "fx"),
        (Checkpointed, "fx"),
        (NoGradient, "fx"),
        (WithoutAutocast, "export"),
        (ByAnotherName, "fx"),
        (ByABoundName, "fx"),
        (WithAFunction, "fx"),
        (GivenAModule, "fx"),
        (ByAList, "export"),
        (SparseBuffers, "fx"),
        (Remembers, "fx"),
        (lambda: nn.Sequential(nn.Linear(4, 4), Drawn()), "sequential"),
        (ClampedInPlace, "export"),
        (Counts, "export"),
        (Averages, "fx"),
        (NoiseOfItsOwn, "export"),
        pytest.param(
            *(partial(OwnGenerator, seeded), "export"),
            marks=pytest.mark.skipif(
                tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
                reason="torch 2.11 exports no generator: refused",
            ),
        ),
        (Rounded, "fx"),
    ],
)
def test_a_front_end_is_taken_that_loses_nothing(make, front_end):
    model = build(make)
    traced = trace(model, "it", call_of())
    assert traced.front_end == front_end
    # On other inputs too, and as often as it runs.
    compare(model, traced.module, call_of(5), run(model, model, call_of(5)))
    assert all(p.grad is None for p in model.parameters())
    fresh = build(make)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.to_dense(), fresh.state_dict()[name].to_dense()), name
    for one, other in zip(model.modules(), fresh.modules(), strict=True):
        assert vars(one).keys() == vars(other).keys()
    assert getattr(model, "calls", 0) == 0


@pytest.mark.parametrize(
    ("make", "front_end"), [(OwnNorm, "fx"), (ByAFlatTensor, "export"), (DetachedByAList, "export")]
)
def test_what_training_changes_is_no_constant(make, front_end):
    model = build(make).eval()
    traced = trace(model, "it", call_of())
    assert traced.front_end == front_end
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    compare(model, traced.module, call_of(5), run(model, model, call_of(5)))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Hooked, r"'a\.weight' another gradient"),
        (HookedModule, r"'a\.weight' another gradient"),
        (ZeroHead, r"'a\.weight' another gradient"),
        (Normed, r"'a\.weight' another gradient"),
        (AveragesAnew, r"another value in buffer 'mean'"),
        (NumberOfAList, r"weights that it reaches otherwise than by their names"),
        (Skips, "the forward draws random numbers"),
        (SkipsByPython, "the forward draws random numbers"),
        (OwnGenerator, "the forward draws random numbers"),
        (partial(OwnGenerator, np.random.default_rng), "the forward draws random numbers"),
        (partial(OwnGenerator, mersenne), "the forward draws random numbers"),
    ],
)
def test_what_every_trace_would_lose_is_refused(make, why):
    model = build(make)
    own = own_states(model.modules())
    with pytest.raises(TraceError, match=why):
        trace(model, "it", call_of())
    # The look has left it as it was.
    assert same_own_states(own)
    assert model(call_of().tensors[0]).isfinite().all()
    assert isinstance(model.mean, torch.Tensor)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Carries, "kept"),
        (partial(Carries, list), "kept"),
        (partial(Carries, lambda pair: Pair(*pair)), "kept"),
        (partial(Carries, TuplesOwn), "kept"),
        (partial(Carries, lambda pair: Record(tuple(pair)), lambda kept: kept.pair), "kept"),
        (partial(Carries, lambda pair: Slotted(tuple(pair)), lambda kept: kept.pair), "kept"),
        (partial(Carries, lambda pair: {"h": [pair]}, lambda kept: kept["h"][0]), "kept"),
        (partial(Carries, lambda pair: deque([tuple(pair)]), lambda kept: kept[0]), "kept"),
        (CarriesInAnotherModule, r"kept, (0\.)?a\.before"),
        (CarriesInAClass, r"CarriesInAClass\.box"),
        (CarriesAround, "AROUND"),
        (CarriesByAHook, "kept"),
    ],
)
def test_what_is_carried_from_call_to_call_is_refused_by_name(make, name):
    """Kept whole, too: a pipeline calls it for each micro-batch."""
    for whole in (False, True):
        model = build(make)
        model = nn.Sequential(model, nn.Linear(6, 2)) if whole else model
        with pytest.raises(TraceError, match=rf"^it: .* remembers .* next \((0\.)?{name}\)"):
            trace(model, "it", call_of())
        assert not [*AROUND, *CarriesInAClass.box]
        assert getattr(model, "kept", None) is None


@pytest.mark.parametrize(
    ("make", "front_end", "why"),
    [
        (OwnBackward, "export", r"'a\.weight' another gradient"),
        (ClampedInPlace, "fx", r"'a\.weight' another gradient"),
        (GivenItsForward, "fx", "doesn't hold parameter 'inside.weight', which the forward trains"),
        (Counts, "fx", "another value in buffer 'steps'"),
        (NoiseOfItsOwn, "fx", "the forward draws random numbers"),
        (partial(OwnGenerator, seeded), "fx", "the forward draws random numbers"),
    ],
)
def test_a_front_end_that_was_asked_for_says_what_it_loses(make, front_end, why):
    with pytest.raises(TraceError, match=why):
        trace(build(make), "it", call_of(), front_end=front_end)


def test_a_module_kept_whole_may_do_what_it_likes():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), Hooked()

        def forward(self, x):
            return self.last(self.first(x))

    model = build(Whole)
    traced = trace(model, "it", call_of(), granularity="last")
    assert [layer.name for layer in traced.layers] == ["first", "last"]
    compare(model, traced.module, call_of(3), run(model, model, call_of(3)))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (CountsCalls, "calls"),
        (CarriesOn, "state"),
        (Penalized, "penalty"),
        (Collects, "seen, by_name"),
    ],
)
def test_what_the_model_alone_remembers_is_said(make, name):
    model = build(make)
    with pytest.warns(TaskWarning, match=f"^it: a forward changes {name}, which the layers' graph"):
        trace(model, "it", call_of(), front_end="fx")
    remembered = {"state": None, "penalty": 0.0, "calls": 0, "seen, by_name": []}
    assert getattr(model, name.partition(",")[0]) == remembered[name]


def test_weights_written_in_a_loop_are_no_part_of_a_graph():
    with pytest.raises(TraceError, match="writes into parameter 'teacher"):
        trace(build(Teaches), "it", call_of(), front_end="fx")


def test_a_look_changes_no_weights():
    for make in (Teaches, Decays):
        model = build(make)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with unchanged(model):
            call_of().of(model, call_of().tensors)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_smallest_weights_of_float16_stay_as_they_were():
    """Also of models that are too large to be kept a second time."""
    model = nn.Linear(4, 6).half()
    for p in model.parameters():
        # Odd multiples of the smallest number, which have no half.
        with torch.no_grad():
            p.copy_((torch.arange(p.numel()) * 2 + 1).reshape(p.shape) * 2.0**-24)
    before = [p.detach().clone() for p in model.parameters()]
    with _moved(model):
        pass
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_what_a_graph_counts_too_is_no_news(recwarn):
    model = nn.Sequential(build(CountsCalls), nn.Linear(6, 2))
    traced = trace(model, "it", call_of(), front_end="sequential")
    assert traced.front_end == "sequential"
    assert not [w for w in recwarn if w.category is TaskWarning]


def test_the_keys_bias_is_rounding_alone():
    model = build(Rounded)
    assert trace(model, "it", call_of(), front_end="export").front_end == "export"


@pytest.mark.parametrize(("by", "refused"), [(1e7, False), (1.0, True)])
def test_what_rounding_makes_of_a_gradient_is_no_difference(by, refused):
    """The sine of a weight times ten million is another one for its next neighbour."""

    class Sensitive(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, added):
            ctx.save_for_backward(weight)
            ctx.added = added
            return weight.sum()

        @staticmethod
        def backward(ctx, gradient):
            (weight,) = ctx.saved_tensors
            return gradient * (weight * by + ctx.added).sin(), None

    class Made(nn.Module):
        def __init__(self, weight, added):
            super().__init__()
            self.weight, self.added = weight, added

        def forward(self, x):
            return x + Sensitive.apply(self.weight, self.added)

    weight = nn.Parameter(torch.linspace(1, 2, 20))
    model, graph = Made(weight, 0.0), Made(weight, 1.0)
    wanted = run(model, model, call_of())
    if refused:
        with pytest.raises(TraceError, match="'weight' another gradient"):
            compare(model, graph, call_of(), wanted)
    else:
        compare(model, graph, call_of(), wanted)
    assert torch.equal(weight.data, torch.linspace(1, 2, 20))


def test_functions_are_told_apart_in_the_fingerprint():
    class Other(Base):
        def between(self, h):
            return Reversed.apply(h, 0.25)

    found = [
        fingerprint(trace(build(make), "it", call_of())) for make in (Base, OwnBackward, Other)
    ]
    assert len(set(found)) == 3
    assert found[1] == fingerprint(trace(build(OwnBackward), "it", call_of(3)))


def test_a_look_changes_neither_buffers_nor_random_states_nor_hooks():
    model = build(AveragesAnew)
    updates = []
    model.a.weight.register_post_accumulate_grad_hook(updates.append)
    mean, states = model.mean, (random.getstate(), torch.get_rng_state())
    with unchanged(model):
        model(call_of().tensors[0])
        random.random()
        assert model.mean is not mean
    assert run(model, model, call_of()).gradients
    assert model.mean is mean
    assert not mean.any()
    assert random.getstate() == states[0]
    assert not updates
    model(call_of().tensors[0]).sum().backward()
    assert len(updates) == 1


def test_marks_tell_what_was_written():
    """Through `.data`, too; of what has no numbers, or none that can be summed, by its version."""
    tensor = torch.zeros(3)
    before = mark_of(tensor)
    tensor.data[0] = 1.0
    assert mark_of(tensor) != before
    with FakeTensorMode():
        fake = torch.zeros(3)
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    for one in (fake, torch.zeros(3, device="meta"), packed):
        assert mark_of(one) == (one._version, "")


def test_without_a_backward_results_alone_are_compared():
    class Detached(Base):
        def forward(self, x):
            return super().forward(x).detach()

    model = build(Detached)
    assert run(model, model, call_of()).gradients is None
    assert trace(model, "it", call_of()).front_end == "fx"
    assert run(model.eval(), model, call_of()).gradients is None


class Named(Base):
    """Its result has keys, a number made of a weight, and a loss of its own."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        h = super().forward(x)
        found = {"scores": h, "more": [h * 2]}
        traced = isinstance(x, torch.fx.Proxy)
        if self.kind == "number":
            found["scale"] = max(float(p.detach().abs().max()) for p in self.a.parameters())
        if self.kind == "keys":
            found["aux" if traced else "balance"] = h.sum()
        if self.kind == "nothing":
            found["aux"] = None if traced else 0.001
        return found


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("number", r"has [\d.]+ at \['scale'\] where the model has [\d.]+: "),
        ("keys", "has 'scores' and 'more' and 'aux' where the model has 'scores' and "),
        ("nothing", r"has None at \['aux'\] where the model has 0.001: "),
    ],
)
def test_keys_and_numbers_of_results_are_the_users(kind, said):
    with pytest.raises(TraceError, match=said):
        trace(build(partial(Named, kind)), "it", call_of(), front_end="fx")
    assert trace(build(partial(Named, "")), "it", call_of(), front_end="fx").layers
