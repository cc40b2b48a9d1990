"""Device specs, and the clock that reckons times from them."""

import contextlib
import math

import msgspec
import pytest
import torch
from helpers.paths import SHIPPED_DEVICES
from timeprest.profiles.device_specs import DeviceSpec, PeakFlops, load_spec, spec_of_gpu
from timeprest.profiles.errors import TargetError, UserError
from timeprest.profiles.files import read_toml
from timeprest.profiles.measuring.optimizer_cost import optimizer_roofline
from timeprest.profiles.measuring.roofline import Roofline
from timeprest.profiles.tracing.fake import fake_mode
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

SPEC = DeviceSpec(
    name="test",
    memory_bytes=10**9,
    memory_bandwidth_bytes_per_s=1e12,
    peak_flops_per_s=PeakFlops(float32=1e12, float16=4e12),
    launch_s=0.0,
    source="made up",
)
USERS = """
name = "mine"
memory_bytes = "80GB"
memory_bandwidth_bytes_per_s = "2039GB/s"
peak_flops_per_s = { float32 = 19.5e12, bfloat16 = 312e12 }
launch_s = "5us"
source = "measured"
"""


def with_spec(**changes):
    return msgspec.structs.replace(SPEC, **changes)


def counts(clock):
    return clock.flops, clock.bytes, clock.operations


def costs(run, *made, spec=SPEC):
    """Counts of `run` over the tensors or modules that the functions in `made` give."""
    found = []
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode:
            things = [make() for make in made]
            with Roofline(spec) as clock:
                run(*things)
        found.append(counts(clock))
    real, fake = found
    assert real == fake
    return real


# Specs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(read_toml(SHIPPED_DEVICES, "")))
def test_shipped_spec_is_consistent(name):
    spec = load_spec(name.upper())
    peak = spec.peak_flops_per_s
    assert spec == load_spec(name)
    assert "https://" in spec.source
    assert 8e9 <= spec.memory_bytes <= 1e12
    # Slower than the arithmetic of any dtype, and the dtypes in the order of their width.
    assert spec.memory_bandwidth_bytes_per_s < peak.float32
    assert peak.float32 <= (peak.tf32 or peak.float32) < peak.float16
    assert peak.bfloat16 in (None, peak.float16)
    assert spec.compute_efficiency == spec.memory_efficiency == 1.0
    assert 0 < spec.launch_s < 1e-4
    # Links are slower than memory, and measured shares have a source.
    assert spec.link is not None
    assert spec.link.bandwidth_bytes_per_s < spec.memory_bandwidth_bytes_per_s
    assert 0 < spec.link.latency_s < 1e-4
    assert spec.link_source
    assert spec.link.share == 1 or "https://" in spec.link_source
    assert (spec.matmul_share is None) == (not spec.matmul_source)
    assert spec_of_gpu(f"NVIDIA {spec.cuda_name}") == spec


def test_users_spec(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(USERS + "memory_efficiency = 0.5\n")
    spec = load_spec(str(path))
    assert (spec.memory_bytes, spec.memory_bandwidth_bytes_per_s) == (80 * 10**9, 2039e9)
    assert spec.launch_s == pytest.approx(5e-6)
    assert spec.memory_efficiency == 0.5
    path.write_text(USERS.replace('"80GB"', "80e9"))
    assert load_spec(str(path)).memory_bytes == 80 * 10**9


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('memory_bytes = "80GB"', "", "memory_bytes"),
        ('"80GB"', '"80 apples"', "memory_bytes"),
        ('"80GB"', "-1", "memory_bytes"),
        ('"2039GB/s"', '"fast"', "memory_bandwidth_bytes_per_s"),
        ('"2039GB/s"', "inf", "memory_bandwidth_bytes_per_s"),
        ("float32 = 19.5e12", "float32 = 0", "float32"),
        ("float32 = 19.5e12", "float32 = nan", "float32"),
        ("float32 = 19.5e12, ", "", "float32"),
        ("bfloat16", "float128", "float128"),
        ('"5us"', '"5 apples"', "launch_s"),
        ("launch_s", "lunch_s", "lunch_s"),
        ('source = "measured"', 'source = ""', "source"),
        ('source = "measured"', 'source = "m"\nmatmul = "tf32"', "matmul"),
        ('source = "measured"', 'source = "m"\ncompute_efficiency = 1.5', "compute_efficiency"),
        ("name =", "name ==", "not valid TOML"),
        ('source = "measured"', 'source = "m"\nlink = { name = "a" }', "link"),
        (
            'source = "measured"',
            'source = "m"\nlink = { name = "a", latency_s = "1 mile" }',
            "link.latency_s",
        ),
    ],
)
def test_broken_spec_is_named(tmp_path, old, new, words):
    path = tmp_path / "mine.toml"
    assert old in USERS
    path.write_text(USERS.replace(old, new))
    with pytest.raises(UserError) as caught:
        load_spec(str(path))
    message = str(caught.value)
    assert words in message
    assert str(path) in message
    assert "\n" not in message


def test_the_beginning_of_a_name_does():
    assert load_spec("h100") == load_spec("h100-80gb")
    with pytest.raises(UserError, match="device 'a100': may be a100-40gb or a100-80gb"):
        load_spec("a100")


def test_unknown_device_lists_the_known(tmp_path):
    with pytest.raises(UserError, match="a100-80gb"):
        load_spec("a101")
    with pytest.raises(UserError, match="no such file"):
        load_spec(str(tmp_path / "none.toml"))


# Operations ----------------------------------------------------------------------------------


def test_linear():
    def run(layer, x):
        layer(x).backward(torch.ones(6, 5))

    flops, moved, operations = costs(
        run, lambda: nn.Linear(4, 5), lambda: torch.randn(6, 4, requires_grad=True)
    )
    products = 2 * 6 * 4 * 5
    assert flops == 3 * products
    # Forward, ones, the gradients of the input, the weight and the bias.
    elements = (24 + 20 + 5 + 30) + 30 + (30 + 20 + 24) + (30 + 24 + 20) + (30 + 5)
    assert (moved, operations) == (4 * elements, 5)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_convolution(kind, grad, groups):
    made = (
        lambda: kind(4, 8, 3, padding=1, stride=2, groups=groups),
        lambda: torch.randn(2, 4, 8, 8, requires_grad=grad),
    )
    # Of the smaller image, every place meets every weight.
    places = 8 * 8 if kind is nn.ConvTranspose2d else 4 * 4
    products = 2 * 2 * places * (4 * 8 // groups * 9)
    assert costs(lambda layer, x: layer(x), *made)[0] == products
    backward = 2 if grad else 1
    assert costs(lambda layer, x: layer(x).sum().backward(), *made)[0] == products * (1 + backward)


def test_attention():
    def run(q, k, v):
        functional.scaled_dot_product_attention(q, k, v).sum().backward()

    def make():
        return torch.randn(2, 3, 7, 4, requires_grad=True)

    flops, _, _ = costs(run, make, make, make)
    # Two products forward; backward those of both, and the scores once more.
    assert flops == (2 + 5) * 2 * (2 * 3) * 7 * 7 * 4


def experts(product):
    """A step of a product of rows with the matrix of their group; the gradients' shapes."""

    def step(rows, matrices, ends):
        product(rows, matrices, ends).square().sum().backward()
        return rows.grad.shape, matrices.grad.shape

    return step


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_mixtures_of_experts(library):
    """In float32, which torch's own rule for fake tensors refuses and its kernels take."""
    if library == "torch":
        functional.__dict__.get("grouped_mm") or pytest.skip("this torch has none")
        step = experts(lambda a, b, ends: functional.grouped_mm(a, b, offs=ends))
    else:
        pytest.importorskip("transformers.integrations.moe")
        step = experts(torch.ops.transformers.grouped_mm_fallback)
    rows, inner, outer = 32, 16, 24
    made = torch.randn(rows, inner), torch.randn(4, inner, outer)
    ends = torch.tensor([8, 8, 20, rows], dtype=torch.int32)
    shapes, flops = [], []
    for mode in (contextlib.nullcontext(), fake_mode()):
        with mode:
            given = [torch.zeros_like(tensor, requires_grad=True) for tensor in made]
            with Roofline(SPEC) as clock:
                shapes.append(step(*given, torch.zeros_like(ends)))
        flops.append(clock.flops)
    assert shapes == [(made[0].shape, made[1].shape)] * 2
    assert flops == [3 * 2 * rows * inner * outer] * 2


def test_recurrent():
    def run(layer, x):
        layer(x)[0].sum().backward()

    found = []
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode, Roofline(SPEC) as clock:
            run(nn.LSTM(4, 5, batch_first=True), torch.randn(2, 3, 4))
        found.append(clock.flops)
    assert found == [3 * 2 * (2 * 3) * 4 * 5 * (4 + 5)] * 2


def test_views_cost_nothing():
    def run(x):
        y = x.view(6, 4).t().reshape(4, 2, 3).permute(2, 0, 1)[1:].unsqueeze(0).expand(5, 2, 4, 2)
        y.detach().transpose(0, 1).split(1)[0].unbind(1)
        x.as_strided((2, 2), (1, 1)).squeeze()
        torch.empty(100)
        torch.empty_like(x)

    assert costs(run, lambda: torch.randn(2, 3, 4)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("run", "elements"),
    [
        (lambda x: x + 1, 16),
        (lambda x: x * x, 16),
        (lambda x: x + x.t()[:, :2].T, 16),  # The same memory by two ways.
        (lambda x: x.add_(1), 16),
        (lambda x: x.zero_(), 8),
        (lambda x: torch.zeros_like(x), 8),
        (lambda x: x.new_zeros(5), 5),
        (lambda x: torch.zeros(5), 5),
        (lambda x: x.clone(), 16),
        (lambda x: torch.cat([x, x]), 8 + 16),
        (lambda x: x[:1].expand(3, 4).contiguous(), 4 + 12),
        (lambda x: x[0].copy_(x[1]), 8),
        (lambda x: x.unfold(1, 2, 1).contiguous(), 8 + 12),
        (lambda x: torch.add(x, 1, out=x), 16),
        (lambda x: torch.ops.aten.unsafe_split(x, 1), 0),
    ],
)
def test_bytes(run, elements):
    assert costs(run, lambda: torch.randn(2, 4))[1] == 4 * elements


def test_rows_count_instead_of_tables():
    index = 3 * 8
    row = 16 * 4
    ids = lambda: torch.tensor([0, 1, 1])  # noqa: E731
    table = lambda: torch.randn(1000, 16)  # noqa: E731
    rows = lambda: torch.randn(3, 16)  # noqa: E731
    assert costs(lambda i, t: functional.embedding(i, t), ids, table)[1] == 6 * row + index
    assert costs(lambda i, t: t[i], ids, table)[1] == 6 * row + index
    assert costs(lambda i, t: t.index_select(0, i), ids, table)[1] == 6 * row + index
    assert costs(lambda i, t, r: t.index_add_(0, i, r), ids, table, rows)[1] == 9 * row + index
    assert costs(lambda i, t, r: t.index_put_((i,), r), ids, table, rows)[1] == 6 * row + index
    one = torch.zeros(()).element_size()
    assert (
        costs(lambda i, t: t.index_put_((i,), t.new_zeros(())), ids, table)[1]
        == 3 * row + index + 2 * one
    )
    # Never more than the table; a log-likelihood takes one number of each row.
    assert costs(lambda i, t: t[:2][i], ids, table)[1] == 5 * row + index
    assert costs(lambda i, t: functional.nll_loss(t[:3], i), ids, table)[1] == 3 * 4 + index + 2 * 4


def test_embedding_backward_writes_the_whole_gradient():
    def run(layer, ids):
        layer(ids).backward(torch.ones(3, 16))

    _, moved, _ = costs(run, lambda: nn.Embedding(1000, 16), lambda: torch.tensor([0, 1, 1]))
    row, index = 16 * 4, 3 * 8
    assert moved == (6 * row + index) + 3 * row + (3 * row + index + 1000 * row)


# Times ---------------------------------------------------------------------------------------


def seconds(run, spec):
    with Roofline(spec) as clock:
        run()
    return clock.seconds


def test_times_follow_the_spec():
    x, a, b = torch.randn(1000), torch.randn(256, 256), torch.randn(256, 256)

    def bound_by_memory():
        x.relu()

    def bound_by_compute():
        a @ b

    fast = with_spec(memory_bandwidth_bytes_per_s=2e12)
    assert seconds(bound_by_memory, SPEC) == pytest.approx(8000 / 1e12)
    assert seconds(bound_by_memory, fast) == pytest.approx(4000 / 1e12)
    assert seconds(bound_by_memory, with_spec(memory_efficiency=0.5)) == pytest.approx(16e-9)
    assert seconds(bound_by_memory, with_spec(launch_s=1.0)) == pytest.approx(1.0)
    assert seconds(bound_by_compute, SPEC) == pytest.approx(2 * 256**3 / 1e12)
    assert seconds(bound_by_compute, fast) == seconds(bound_by_compute, SPEC)
    half = with_spec(compute_efficiency=0.5)
    assert seconds(bound_by_compute, half) == pytest.approx(4 * 256**3 / 1e12)


@pytest.mark.parametrize(
    ("dtype", "peak"), [(torch.float32, 1e12), (torch.float16, 4e12), (torch.bfloat16, 1e12)]
)
def test_peak_of_the_dtype(dtype, peak):
    with FakeTensorMode():
        a = torch.randn(512, 512, dtype=dtype)
        assert seconds(lambda: a @ a, SPEC) == pytest.approx(2 * 512**3 / peak)


@pytest.fixture
def _tf32_flags():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


@pytest.mark.usefixtures("_tf32_flags")
def test_tf32_by_the_spec_or_by_torchs_flags():
    peaks = PeakFlops(float32=1e12, tf32=8e12)
    spec = with_spec(peak_flops_per_s=peaks, memory_bandwidth_bytes_per_s=1e15)
    convolution = 2 * 8 * 32 * 32 * 64 * 64 * 9
    with FakeTensorMode():
        a, x, w = torch.randn(512, 512), torch.randn(8, 64, 32, 32), torch.randn(64, 64, 3, 3)

        def check(spec, matmul, conv):
            assert seconds(lambda: a @ a, spec) == pytest.approx(2 * 512**3 / matmul)
            assert seconds(lambda: functional.conv2d(x, w, padding=1), spec) == pytest.approx(
                convolution / conv
            )

        check(spec, 1e12, 8e12)  # As torch is, if nobody says otherwise.
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = False
        check(spec, 8e12, 1e12)
        torch.backends.cuda.matmul.allow_tf32 = False
        check(spec, 1e12, 1e12)
        check(msgspec.structs.replace(spec, matmul="tf32"), 8e12, 8e12)


# Models --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        m, t, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(m, t, 3, self.heads, width // self.heads)
        y = functional.scaled_dot_product_attention(
            *qkv.permute(2, 0, 3, 1, 4).unbind(0), is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(m, t, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self, width, heads, blocks, vocabulary):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        return self.head(self.blocks(self.embedding(ids)))


def train_once(model, ids):
    loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()


def transformer_flops(width, blocks, vocabulary, batch, context):
    """6·N for each token, and attention: 2 products forward, 5 backward."""
    matrices = blocks * 12 * width**2 + vocabulary * width
    return 6 * matrices * batch * context + blocks * (2 + 5) * 2 * batch * context**2 * width


def test_transformer():
    flops, moved, operations = costs(
        train_once,
        lambda: Transformer(32, 4, 2, 50),
        lambda: torch.randint(0, 50, (3, 8)),
    )
    assert flops == transformer_flops(32, 2, 50, 3, 8)
    assert moved > 0
    assert operations > 50


def test_a_model_that_fits_nowhere():
    spec = load_spec("a100-80gb")
    with FakeTensorMode():
        model = Transformer(12288, 96, 4, 50257)
        ids = torch.randint(0, 50257, (1, 2048))
        with Roofline(spec) as clock:
            model(ids)
            forward = clock.flops
        with Roofline(spec) as clock:
            train_once(model, ids)
    assert clock.flops == transformer_flops(12288, 4, 50257, 1, 2048)
    assert 2.9 < clock.flops / forward < 3.1
    # TF32 is off for matrix products, so nearly all goes at the peak of float32.
    assert clock.seconds == pytest.approx(clock.flops / 19.5e12, rel=0.05)


def test_inference_mode_counts_alike():
    model, ids = Transformer(32, 4, 2, 50).eval(), torch.randint(0, 50, (3, 8))
    with torch.no_grad(), Roofline(SPEC) as usual:
        model(ids)
    with torch.inference_mode(), Roofline(SPEC) as inference:
        model(ids)
    assert counts(usual) == counts(inference)


# Optimizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name", "ratio"),
    [
        (None, "SGD", 1.0),
        (lambda found: torch.optim.SGD(found, lr=0.1), "SGD", 0.0),
        (lambda found: torch.optim.Adam(found, lr=0.1), "Adam", 2.0),
    ],
)
def test_optimizer(make, name, ratio):
    spec = with_spec(launch_s=1e-6, memory_efficiency=0.5)
    cost = optimizer_roofline(make, spec)
    assert (cost.name, cost.state_bytes_per_parameter_byte) == (name, ratio)
    assert cost.update_s_per_byte == pytest.approx((3 + 2 * ratio) / 0.5e12)
    assert 1e-6 <= cost.update_fixed_s < 30e-6
    with FakeTensorMode():
        assert optimizer_roofline(make, spec) == cost
    half = optimizer_roofline(make, spec, torch.bfloat16)
    assert half.state_bytes_per_parameter_byte == ratio


def test_broken_optimizer_is_the_users_mistake():
    with pytest.raises(TargetError, match="optimizer"):
        optimizer_roofline(lambda found: torch.optim.SGD(found, lr=-1), SPEC)


def test_clock_is_finite():
    with Roofline(SPEC) as clock:
        torch.zeros(0).sum()
        torch.zeros(0, 3) @ torch.zeros(3, 4)
    assert math.isfinite(clock.seconds)
    assert clock.flops == 0
