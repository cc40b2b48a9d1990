"""What is measured can be trusted: bytes are autograd's, times are known to a stated error."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import time
import weakref
from collections import UserDict
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers.models.small import TARGETS, ZOO, all_but, light_models, make_shallow
from helpers.stage_costs import stage_cost
from hypothesis import given
from hypothesis import strategies as st
from timeprest.cli.tables.profile import layer_sum_ratios
from timeprest.profiles.autograd.boundary import SavedBytes
from timeprest.profiles.errors import TaskWarning, UserError
from timeprest.profiles.measuring.bench import relative_error, worst_error
from timeprest.profiles.measuring.checks import place_call
from timeprest.profiles.measuring.measure import default_sizes, measure
from timeprest.profiles.measuring.platforms import platform_of
from timeprest.profiles.target import InputSpec, Target, resolve
from timeprest.profiles.tasks.task import root_of
from timeprest.profiles.tracing.call import Call
from timeprest.profiles.tracing.front_ends import trace
from torch import nn

BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def shallow_nets(monkeypatch):
    make_shallow(monkeypatch)


def held_by_autograd(target, model, size, front_end):
    """Bytes that autograd keeps for the whole model in one piece.

    The user's own model, called as the user would; an exported one as it was exported:
    transformers' Llama and T5 make their masks explicit when they are.
    """
    call, wanted = target.call(size)
    traced = trace(model, "it", call, front_end=front_end)
    with SavedBytes(ignore=[*model.parameters(), *model.buffers()]) as saved:
        result = call.of(model) if front_end == "fx" else traced.module(*call.tensors)
        loss = root_of(target.task.loss(result, wanted)) if target.task else None
    assert loss is None or loss.requires_grad
    return saved.total


def test_counting_lets_go_of_what_was_counted():
    """An operation that saves what it made holds itself, where that is kept as it is."""
    x = torch.ones(3, requires_grad=True)
    with SavedBytes() as saved:
        made = x.exp()
    assert saved.total == 12
    there = weakref.ref(made)
    del made
    gc.collect()
    assert there() is None
    assert saved.total == 0


def _blocks() -> nn.Module:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return nn.Sequential(*[deepcopy(block) for _ in range(2)])


@pytest.mark.parametrize("there", [None, _blocks()])
def test_where_nothing_is_run_models_are_made_by_copies_or_there_before(there):
    target = Target("it", None, lambda: there or _blocks(), (InputSpec((4,), torch.float32),))
    found = [
        measure(target, batch_size=4, micro_batch_sizes=[4], seconds=0, platform=platform)
        for platform in (platform_of("cpu"), platform_of("meta", "a100-80gb"))
    ]
    measured, computed = (
        [(one.parameter_bytes, one.measurements[0].saved_bytes) for one in profile.layers]
        for profile in found
    )
    assert measured == computed


@pytest.mark.choice(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", all_but("resnet50", "inception_v3", "densenet121", "hf-bert", "hf-vit")
)
def test_layers_add_up_to_the_whole_model(name):
    """Saved bytes are autograd's, measured layer by layer, and the same where nothing was run.

    There, every operation of the whole step is some layer's: nothing is lost or counted twice.
    """
    # Of T5's layers each is exported five times; what they share, pieces show (test_pieces).
    target = resolve(f"{name},num_layers=1,num_decoder_layers=1" if name == "hf:t5" else name)
    # What a second size adds, a few show.
    sizes = [2, 4] if name in (ZOO["mlp"], ZOO["resnet18"], ZOO["gpt2"]) else [4]
    measured = measure(target, batch_size=4, micro_batch_sizes=sizes, seconds=0)
    computed = measure(
        target, batch_size=4, micro_batch_sizes=sizes, platform=platform_of("meta", "a100-80gb")
    )
    model = target.model()
    names = [layer.name for layer in measured.layers]
    for k, size in enumerate(sizes):
        held = held_by_autograd(target, model, size, measured.front_end)
        assert measured.whole_model[k].saved_bytes == held
        assert stage_cost(measured, names, size, last=True).kept_bytes == held
    for one, other in zip(measured.layers, computed.layers, strict=True):
        if "LSTM" in one.kind:  # oneDNN keeps a workspace that only a run shows
            continue
        assert (one.name, one.kind, one.parameter_bytes) == (
            other.name,
            other.kind,
            other.parameter_bytes,
        )
        assert [m.saved_bytes for m in one.measurements] == [
            m.saved_bytes for m in other.measurements
        ]
        assert all(m.relative_error is not None for m in one.measurements)
        assert all(m.relative_error is None for m in other.measurements)
    assert measured.edges == computed.edges
    assert measured.fingerprint == computed.fingerprint
    for _, ratio in layer_sum_ratios(computed):
        assert ratio == pytest.approx(1, rel=0.02)
    assert computed.device == "meta:a100-80gb"
    assert "Nothing was run" in computed.assumptions[0]


@pytest.mark.slow
def test_a_model_that_fits_nowhere_is_profiled_without_memory():
    """A layer of GPT-3's width alone has 7 GB of weights; what is large costs what is small."""
    found = measure(
        resolve("gpt2:layers=2,width=12288,heads=96,context=2048,vocabulary=1000,dropout=0"),
        batch_size=2,
        micro_batch_sizes=[1, 2],
        platform=platform_of("meta", "a100-80gb", "bfloat16"),
    )
    block = [layer for layer in found.layers if layer.name.startswith("h.0.")]
    assert sum(layer.parameter_bytes for layer in block) == 4 * (12 * 12288**2 + 13 * 12288)
    # 6 operations for each weight and token at the peak of bfloat16, at the least.
    matrix_s = 6 * 12 * 12288**2 * 2 * 2048 / 312e12
    step_s = sum(m.forward_s + m.backward_s for la in block for m in la.measurements[-1:])
    assert matrix_s < step_s < 2 * matrix_s
    assert found.autocast == "bfloat16"


@pytest.mark.slow
def test_autocast_changes_what_is_kept():
    plain, cast = (
        measure(
            resolve(ZOO["gpt2"]), batch_size=4, platform=platform_of("cpu", None, dtype), seconds=0
        )
        for dtype in (None, "bfloat16")
    )
    assert (plain.autocast, cast.autocast) == (None, "bfloat16")
    assert plain.whole_model[-1].saved_bytes != cast.whole_model[-1].saved_bytes
    assert plain.fingerprint == cast.fingerprint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("meta", None, None), "--device meta: say which device"),
        (("cpu", "a10", None), "--spec: goes with --device meta"),
        (("meta", "nothing", None), "no device 'nothing'"),
        (("cpu", None, "int8"), "--autocast 'int8'"),
        (("gpu", None, None), "--device 'gpu': give one of cpu, cuda, meta"),
        (("cuda:1", None, None), "--device 'cuda:1': give one of"),
    ],
)
def test_platforms_that_are_none(arguments, message):
    with pytest.raises(UserError, match=message):
        platform_of(*arguments)


def test_cuda_is_refused_where_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(UserError, match="no CUDA device"):
        platform_of("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_events_and_the_allocator_are_read():
    found = measure(resolve(ZOO["resnet18"]), batch_size=8, platform=platform_of("cuda"), seconds=1)
    assert found.device == "cuda"
    assert all(la.measurements[-1].forward_s > 0 for la in found.layers if la.parameter_bytes)
    assert max(la.measurements[-1].workspace_bytes for la in found.layers) > 0
    assert found.whole_model[-1].forward_s > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", TARGETS)
def test_every_model_profiles_on_a_gpu(name):
    found = measure(
        resolve(name),
        batch_size=4,
        micro_batch_sizes=[2, 4],
        platform=platform_of("cuda"),
        seconds=0,
    )
    target = resolve(name)
    model = target.model().cuda()
    call, _ = target.call(4)
    call = call.with_tensors([t.cuda() for t in call.tensors])
    # As `held_by_autograd` does.
    traced = trace(model, "it", call, front_end=found.front_end)
    with SavedBytes(ignore=[*model.parameters(), *model.buffers()]) as saved:
        result = call.of(model) if found.front_end == "fx" else traced.module(*call.tensors)
    assert result is not None
    loss = found.loss[-1].saved_bytes if found.loss else 0
    assert saved.total <= found.whole_model[-1].saved_bytes <= saved.total + loss


@pytest.mark.choice(0)
@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in light_models() if "shuffle" in p.stem])
def test_an_onnx_file_is_profiled_with_more_than_its_batch(path):
    found = measure(resolve(str(path)), batch_size=2, seconds=0)
    assert found.front_end == "onnx"
    assert found.micro_batch_sizes == (1, 2)
    assert not found.loss
    assert found.whole_model[1].saved_bytes > found.whole_model[0].saved_bytes


@pytest.mark.slow
def test_micro_batches_of_one_are_left_out_where_the_model_refuses_them():
    found = measure(resolve(ZOO["resnet18"]), batch_size=4, seconds=0)
    assert found.micro_batch_sizes == (2, 4)
    assert "Micro-batches of 1 were left out" in found.assumptions[0]
    with pytest.raises(UserError, match="more than 1 value per channel"):
        measure(resolve(ZOO["resnet18"]), batch_size=4, micro_batch_sizes=[1, 4], seconds=0)


def test_default_sizes():
    assert default_sizes(64) == (4, 8, 16, 32, 64)
    assert default_sizes(12) == (3, 6, 12)
    assert default_sizes(7) == (7,)
    assert default_sizes(64, platform_of("meta", "t4")) == (4, 16, 64)


# How sure a time is ------------------------------------------------------------------------


@given(st.floats(1e-6, 10), st.floats(0.01, 0.2), st.integers(20, 100), st.randoms())
def test_the_error_is_that_of_the_median(middle, spread, count, rng):
    """Of the right size for normal noise, whatever the scale: checked by making it anew."""
    draws = random.Random(rng.random())
    times = [middle * max(1 + spread * draws.gauss(0, 1), 0.01) for _ in range(count)]
    expected = 1.2533 * spread / count**0.5
    assert 0.3 * expected < relative_error(times) < 2.5 * expected


def test_errors_of_few_and_of_equal_times():
    assert relative_error([1.0]) == 1
    assert relative_error([0.0, 0.0]) == 0
    assert relative_error([2.0, 2.0, 2.0]) == 0
    # A few times when the machine was busy elsewhere don't count.
    assert relative_error([1.0] * 9 + [50.0]) == 0


def test_light_layers_needn_t_be_known_well():
    heavy, light = [1.0, 1.0, 1.0], [0.001, 0.004, 0.002]
    assert worst_error([heavy, light]) == 0
    assert worst_error([light]) > 0.1


def test_measuring_ends_when_times_are_sure_or_the_seconds_over():
    target = resolve(ZOO["mlp"])
    begin = time.perf_counter()
    measure(target, batch_size=4, seconds=100, relative_error=0.9)
    assert time.perf_counter() - begin < 30
    begin = time.perf_counter()
    measure(target, batch_size=4, seconds=1, relative_error=1e-9)
    assert time.perf_counter() - begin < 30


@pytest.mark.processes
def test_ctrl_c_leaves_no_file(tmp_path):
    command = [BIN / "tp-profile", "text", "--seconds", "100", "--relative-error", "1e-6"]
    process = subprocess.Popen(
        [*map(str, command), "-o", "profile.json"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    time.sleep(8)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1].endswith("stopped")
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_from_python():
    import timeprest

    found = timeprest.profile("digits", device="meta", spec="t4", micro_batch_sizes=[2, 4])
    assert (found.device, found.batch_size) == ("meta:t4", 4)


def test_targets_are_placed_whatever_container_they_are_in():
    """Of classes that torch's pytree doesn't know, such as what a tokenizer gives."""

    def place(tensor):
        return tensor.to("meta")

    @dataclass
    class Boxes:
        corners: torch.Tensor
        names: tuple[str, ...]

    here = torch.zeros(2)
    target = UserDict({"labels": here, "boxes": [Boxes(here, ("a", "b"))]})
    call, placed = place_call(place, Call((here,), (None,)), target)
    assert call.tensors[0].is_meta
    assert type(placed) is UserDict
    assert placed["labels"].is_meta
    assert placed["boxes"][0].corners.is_meta
    assert placed["boxes"][0].names == ("a", "b")


class SideBySide:
    """Parameters of a layer that are views of one tensor."""

    def model(self):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        for layer in net:
            flat = torch.nn.utils.parameters_to_vector(layer.parameters()).detach()
            torch.nn.utils.vector_to_parameters(flat, layer.parameters())
        return net

    def data(self, split):
        return torch.utils.data.TensorDataset(torch.ones(4, 4), torch.zeros(4, 4))

    def loss(self, output, target):
        return torch.nn.functional.mse_loss(output, target)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)


def test_parameters_that_are_views_of_one_tensor_count_each():
    profile = measure(resolve(f"{__file__}:SideBySide"), batch_size=4, seconds=0)
    assert [layer.parameter_bytes for layer in profile.layers] == [80, 80]


class Averages(torch.nn.Linear):
    """Writes into a buffer by two operations, of which one hands it on to the other."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = torch.tanh(torch.nn.functional.linear(x, self.weight))
        self.mean.mul_(0.9).add_(y.detach().mean(0))
        return y * 2 - self.mean.clone()


class AveragesTask(SideBySide):
    def model(self):
        return torch.nn.Sequential(Averages())


def test_operations_that_change_a_buffer_stay_where_it_is():
    """A change of the copy that another stage is sent would be none of the buffer."""
    target = resolve(f"{__file__}:AveragesTask")
    with pytest.warns(TaskWarning, match=r"the forward doesn't use 0\.bias: no layer of the prof"):
        profile = measure(target, batch_size=4, seconds=0, granularity="op")
    assert any({"0.mul_", "0.add_"} <= set(group) for group in profile.tied)
