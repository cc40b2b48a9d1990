"""Training on GPUs. Each test says what it needs and is skipped where that isn't there."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from helpers.drawn.pipelines import ALL
from helpers.models.small import ZOO
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import RunError
from timeprest.profiles.measuring import capture
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.measuring.platforms import platform_of
from timeprest.profiles.measuring.process_settings import settings_put_back
from timeprest.profiles.target import resolve
from timeprest.runtime.communication.pinned_memory import CudaCopier
from timeprest.runtime.communication.transport import IPC, NCCL, PINNED
from timeprest.runtime.prepare.clock import AHEAD, CudaStreamClock, Spans, UnderWay, number
from timeprest.runtime.prepare.devices import gpu_count
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.stage.gradients import finiteness
from timeprest.runtime.verify.check import check
from timeprest.runtime.verify.dry_run import dry_run
from timeprest.tests.benchmarks.speed.racing.processes import run_ranks
from timeprest.tests.benchmarks.speed.racing.rank import RankSpec

GPUS = gpu_count()
CARDS = torch.cuda.device_count() if torch.cuda.is_available() else 0
"""Fewer, where ranks of one card count as GPUs of their own (`devices.RANKS_ON_A_CARD`)."""

one_gpu = pytest.mark.skipif(not GPUS, reason="needs a GPU")
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, and there are {GPUS}")


def plan_for(profile, variant, stages=2, **options):
    n = 1 if VARIANTS[variant].whole_mini_batches else 4
    return plan_by_hand(with_times(profile), variant, stages, n, **options)


def assert_close(one, other, tolerance=1e-9):
    found, wanted = load_weights(one), load_weights(other)
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=tolerance)


@one_gpu
@pytest.mark.parametrize("variant", ALL)
def test_inline_on_a_gpu_is_inline_on_the_cpu(variant, mlp_profile, mlp_target, tmp_path):
    plan = plan_for(mlp_profile, variant, 3)
    for device in ("cpu", "cuda"):
        settings = RunSettings(task=mlp_target, steps=6, device=device)
        summary = run(plan, settings, tmp_path / device, inline=True)
    assert all(report.device == "cuda:0" for report in summary.stages)
    assert all(0 < r.device_peak_bytes < r.device_used_bytes for r in summary.stages)
    assert_close(tmp_path / "cuda", tmp_path / "cpu")


WAYS = {"ipc": IPC, "gloo": PINNED, "nccl": NCCL}


def check_processes(plan, target, tmp_path, way, tolerance=0.0, **options):
    """They have the inline run's weights."""
    settings = RunSettings(task=target, device="cuda", deterministic=True, **options)
    summary = run(plan, msgspec.structs.replace(settings, transport=way), tmp_path / "processes")
    assert [report.not_by_ipc for report in summary.stages] == [""] * len(summary.stages)
    assert {report.transport for report in summary.stages} == {WAYS[way]}
    with settings_put_back():
        run(plan, settings, tmp_path / "inline", inline=True)
    assert_close(tmp_path / "processes", tmp_path / "inline", tolerance)
    return summary


@pytest.mark.processes
@one_gpu
@pytest.mark.parametrize("way", ["ipc", "gloo"])
@pytest.mark.parametrize("replicas", [[1, 1], [2, 1]])
@pytest.mark.parametrize("variant", ["timeprest", "pipedream-2bw", "gpipe"])
def test_stages_that_share_a_gpu(variant, replicas, way, mlp_profile, mlp_target, tmp_path):
    plan = plan_for(mlp_profile, variant, replicas=replicas)
    check_processes(plan, mlp_target, tmp_path, way, 1e-9, steps=6)


@pytest.mark.processes
@one_gpu
@pytest.mark.parametrize("way", ["ipc", "gloo"])
@pytest.mark.parametrize("variant", ["timeprest", "pipedream-2bw", "zb-h1"])
def test_workers_of_several_stages_that_share_a_gpu(
    variant, way, mlp_profile, mlp_target, tmp_path
):
    plan = plan_for(mlp_profile, variant, 4, placement=(0, 1, 1, 0))
    check_processes(plan, mlp_target, tmp_path, way, 1e-9, steps=6)


SMALL = {
    "digits": "digits",
    "gpt2": f"{ZOO['gpt2']},tied=0",
    "resnet50": "resnet50:size=64,classes=5",
}


@pytest.fixture(scope="session")
def profiles():
    """Of the digits' network, with convolutions, whose library is loaded by the first of them; of a
    GPT and a ResNet-50; and others."""
    found = {}

    def profile(name):
        if name not in found:
            target = resolve({**SMALL, **CAPTURED}[name])
            measured = measure(target, batch_size=8, micro_batch_sizes=[2, 8], seconds=0)
            found[name] = with_times(measured)
        return found[name]

    return profile


@pytest.mark.processes
@one_gpu
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("variant", ALL)
def test_processes_are_the_inline_run_to_the_last_bit(variant, name, profiles, tmp_path):
    """Through slots of the GPU's memory."""
    check_processes(plan_for(profiles(name), variant), SMALL[name], tmp_path, "ipc", steps=8)


@pytest.mark.processes
@two_gpus
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("variant", ALL)
def test_so_are_stages_with_a_gpu_each(variant, name, profiles, tmp_path):
    """The first convolution waits for all that was posted, and nothing stands still."""
    plan, task = plan_for(profiles(name), variant), SMALL[name]
    summary = check_processes(plan, task, tmp_path, "nccl", steps=8, clip_norm=1.0)
    assert [report.device for report in summary.stages] == ["cuda:0", f"cuda:{1 % CARDS}"]


@pytest.mark.processes
@two_gpus
@pytest.mark.parametrize("variant", ["timeprest", "pipedream-2bw", "zb-h1"])
def test_workers_of_several_stages_with_a_gpu_each(variant, mlp_profile, mlp_target, tmp_path):
    plan = plan_for(mlp_profile, variant, 4, placement=(0, 1, 1, 0))
    summary = check_processes(plan, mlp_target, tmp_path, "nccl", 1e-9, steps=6, clip_norm=1.0)
    devices = [f"cuda:{d % CARDS}" for d in (0, 1, 1, 0)]
    assert [report.device for report in summary.stages] == devices


@pytest.mark.processes
@two_gpus
@pytest.mark.parametrize("way", ["ipc", "nccl"])
@pytest.mark.parametrize("replicas", [[2], [2, 1]])
def test_replicas_sum_by_nccl(replicas, way, mlp_profile, mlp_target, tmp_path):
    if sum(replicas) > GPUS:
        pytest.skip(f"needs {sum(replicas)} GPUs, and there are {GPUS}")
    plan = plan_for(mlp_profile, "timeprest", len(replicas), replicas=replicas)
    check_processes(plan, mlp_target, tmp_path, way, 1e-9, steps=6)


@pytest.mark.processes
@one_gpu
@pytest.mark.parametrize("way", ["ipc", "gloo", "nccl"])
@pytest.mark.parametrize("trap", ["exit:0", "SIGKILL:1", "raise:1", "SIGSTOP:1"])
def test_all_end_soon_when_one_dies(trap, way, mlp_profile, tmp_path, monkeypatch):
    """Though the others' GPU has messages of it to wait for."""
    if way == "nccl" and GPUS < 2:
        pytest.skip(f"needs two GPUs, and there are {GPUS}")
    monkeypatch.chdir(tmp_path)
    Path("trap.txt").write_text(f"{trap}:0.1")
    task = f"{TESTS / 'tasks/failing_tasks.py'}:TrapTask"
    settings = RunSettings(
        task=task, steps=40, evaluate=False, timeout_s=4, device="cuda", transport=way
    )
    begin = time.monotonic()
    with pytest.raises(RunError, match=f"stage {trap[-1]}"):
        run(plan_for(mlp_profile, "timeprest"), settings, tmp_path / "run")
    assert time.monotonic() - begin < 45


@pytest.mark.processes
@one_gpu
def test_runs_through_slots_go_on_and_evaluate(profiles, tmp_path):
    plan = plan_for(profiles("digits"), "timeprest")
    settings = RunSettings(
        task="digits", steps=8, checkpoint_every=4, device="cuda", deterministic=True
    )
    run(plan, settings, tmp_path / "run")
    wanted = load_weights(tmp_path / "run")
    summary = resume(tmp_path / "run", at=4)
    assert {report.transport for report in summary.stages} == {IPC}
    found = load_weights(tmp_path / "run")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@one_gpu
@pytest.mark.parametrize("options", [{}, {"recompute": (True, True)}])
def test_a_run_goes_on_from_its_checkpoint(options, tmp_path):
    """With dropout, whose random numbers are the GPU's; and it may go on on the CPU."""
    task = f"{TESTS / 'tasks/checkpoint_tasks.py'}:ShakenTask"
    profile = measure(resolve(task), batch_size=8, micro_batch_sizes=[2, 4, 8], seconds=0)
    plan = plan_for(profile, "timeprest", **options)
    settings = RunSettings(task=task, steps=8, checkpoint_every=4, device="cuda", evaluate=False)
    run(plan, settings, tmp_path / "run", inline=True)
    wanted = load_weights(tmp_path / "run")
    resume(tmp_path / "run", at=4, inline=True)
    found = load_weights(tmp_path / "run")
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=1e-9)
    summary = resume(tmp_path / "run", {"device": "cpu"}, at=4, inline=True)
    assert all(report.device == "cpu" for report in summary.stages)


@one_gpu
def test_a_run_of_the_cpu_goes_on_on_a_gpu(mlp_profile, mlp_target, tmp_path):
    plan = plan_for(mlp_profile, "timeprest")
    adam = OptimizerChoice(name="adam", lr=0.01)
    settings = RunSettings(task=mlp_target, steps=8, checkpoint_every=4, optimizer=adam)
    run(plan, settings, tmp_path / "run", inline=True)
    wanted = load_weights(tmp_path / "run")
    resume(tmp_path / "run", {"device": "cuda"}, at=4, inline=True)
    found = load_weights(tmp_path / "run")
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=1e-9)


@one_gpu
def test_autocast_is_the_gpus(tmp_path):
    task = f"{TESTS / 'tasks/device_tasks.py'}:PositionsTask"
    profile = measure(resolve(task), batch_size=8, micro_batch_sizes=[2, 4, 8], seconds=0)
    plan = plan_for(profile, "timeprest")
    settings = RunSettings(task=task, steps=4, device="cuda", autocast="bfloat16")
    run(plan, settings, tmp_path / "run", inline=True)
    single = RunSettings(task=task, steps=4, device="cuda", autocast="off")
    run(plan, single, tmp_path / "single", inline=True)
    assert_close(tmp_path / "run", tmp_path / "single", 5e-2)
    weights = load_weights(tmp_path / "run")
    others = load_weights(tmp_path / "single")
    assert any(not torch.equal(weights[name], others[name]) for name in weights)


@one_gpu
def test_a_dry_run_asks_the_gpu(mlp_profile, mlp_target, tmp_path):
    plan = plan_for(mlp_profile, "timeprest")
    settings = RunSettings(task=mlp_target, steps=4, device="cuda")
    found = dry_run(plan, settings, str(tmp_path / "run"))
    assert found.transport == IPC
    assert [worker.computes_on for worker in found.workers] == ["cuda:0", f"cuda:{1 % CARDS}"]
    assert all(gpu.free_bytes > 0 for gpu in found.gpus)


@one_gpu
def test_a_copy_holds_what_was_there_when_it_was_asked_for():
    """Though the device is still computing it, and computes on."""
    device = torch.device("cuda", 0)
    copier = CudaCopier(device)
    tensor = torch.randn(1000, 1000, device=device)
    product = tensor
    for _ in range(20):
        product = torch.tanh(product @ tensor)
    host, landing = copier.down(product.t())
    later = product @ tensor
    landing.synchronize()
    assert host.is_pinned()
    assert torch.equal(host, product.t().cpu())
    again = copier.up(host)
    del host
    assert torch.equal(again.t() @ tensor, later)


@pytest.mark.processes
@one_gpu
def test_a_check_isnt_misled_by_what_a_gpu_adds_up_in_any_sequence(tmp_path):
    """The digits have convolutions and Adam, which makes much of rounding."""
    profile = measure(resolve("digits"), batch_size=8, micro_batch_sizes=[2], seconds=0)
    settings = RunSettings(task="digits", device="cuda", steps=6)
    for variant in ("timeprest", "gpipe"):
        plan = plan_for(profile, variant)
        assert check(plan, settings).verdict == "same"


@one_gpu
def test_a_deterministic_run_has_the_same_bits_every_time(tmp_path):
    profile = measure(resolve("digits"), batch_size=8, micro_batch_sizes=[2], seconds=0)
    plan = plan_for(profile, "timeprest")
    settings = RunSettings(task="digits", device="cuda", steps=20, deterministic=True)
    with settings_put_back():
        for name in ("one", "other"):
            run(plan, settings, tmp_path / name, inline=True)
    assert_close(tmp_path / "one", tmp_path / "other", 0.0)


@one_gpu
def test_numbers_that_arent_finite_are_found_on_a_gpu():
    def found(*values):
        return finiteness([torch.tensor([1.0, value], device="cuda") for value in values])()

    assert found(0.0, 3e38, -3e38)
    assert not found(0.0, float("inf"))
    assert not found(float("nan"), 0.0)


@one_gpu
def test_gradients_in_float16_whose_squares_overflow_are_finite():
    tensors = [torch.full((1000,), 6e4, device="cuda").half(), torch.ones(3, device="cuda")]
    late = finiteness(tensors)
    tensors[0].fill_(float("nan"))
    assert late()
    assert not finiteness(tensors)()


@pytest.mark.processes
@one_gpu
def test_what_a_process_takes_besides_tensors_is_profiled():
    """What it is exactly can't be said here, where other tests come and go on the same card."""
    profile = measure(
        resolve("digits"),
        batch_size=64,
        micro_batch_sizes=[2, 64],
        seconds=0,
        platform=platform_of("cuda"),
    )
    assert profile.reserved_bytes > 0
    assert 0 <= profile.reserved_share < 1
    for stage in plan_for(profile, "timeprest").predicted.stages:
        assert stage.memory_bytes >= profile.reserved_bytes + stage.accounted_memory.total


@one_gpu
def test_the_host_runs_ahead_of_a_gpu_and_knows_its_times():
    device = torch.device("cuda", 0)
    tensor = torch.randn(4096, 4096, device=device)
    clock, times, values = CudaStreamClock(device), [], []
    under_way = UnderWay(clock)
    (tensor @ tensor).sum().item()
    clock.start()
    begin_s = time.perf_counter()
    for k in range(AHEAD):
        begin = clock.mark()
        for _ in range(20):
            tensor = torch.tanh(tensor @ tensor)
        value = number(tensor.sum() * 0 + k)
        end = clock.mark()
        spans = Spans(begin, begin, end, end, [(begin, end)], [])

        def note(spans=spans, value=value):
            times.append(spans.times(clock))
            values.append(float(value))

        under_way.add(end, note)
    handed_in_s = time.perf_counter()
    assert len(under_way) > 1
    under_way.note()
    end_s = time.perf_counter()
    assert values == list(range(AHEAD))
    took = [each.compute_s for each in times]
    assert handed_in_s - begin_s < 0.5 * sum(took)
    # Others may have the card between.
    assert times[0].begin_s == pytest.approx(begin_s, abs=0.1)
    assert times[-1].end_s == pytest.approx(end_s, abs=0.1)
    assert 0.5 < sum(took) / (end_s - begin_s) < 1.01
    for one, other in itertools.pairwise(times):
        assert one.end_s <= other.begin_s + 1e-6


@one_gpu
@pytest.mark.parametrize("more", [{}, {"on_nan": "skip", "clip_norm": 1.0}])
def test_operations_on_a_gpu_follow_one_another(more, mlp_profile, mlp_target, tmp_path):
    plan = plan_for(mlp_profile, "timeprest", 1)
    settings = RunSettings(
        task=mlp_target, steps=6, device="cuda", log_operations=True, evaluate=False, **more
    )
    begin_s = time.perf_counter()
    summary = run(plan, settings, tmp_path, inline=True)
    end_s = time.perf_counter()
    (log,) = (tmp_path / "operations").glob("*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == 6 * (4 + 1 + 1)
    assert begin_s < lines[0]["begin_s"] <= lines[-1]["sent_s"] < end_s + 1e-3
    for line in lines:
        assert line["begin_s"] <= line["start_s"] < line["end_s"] <= line["sent_s"]
        spent = line["compute_s"] + line["communication_s"] + line["loading_s"]
        assert spent <= line["sent_s"] - line["begin_s"] + 1e-5
    for one, other in itertools.pairwise(lines):
        assert one["sent_s"] <= other["begin_s"] + 1e-5
    (report,) = summary.stages
    assert 0 < report.compute_s < report.wall_s


@pytest.mark.processes
@one_gpu
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_torchs_pipelines_share_a_gpu_in_races(schedule):
    spec = RankSpec(model="gpt", kind="plain", warm=1, timed=2, computes_on="cuda")
    (wanted,) = run_ranks(spec)
    spec = msgspec.structs.replace(
        spec, kind="tdp", processes=2, schedule=schedule, micro_batches=4, cuts=(5,)
    )
    found = run_ranks(spec)[-1]
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-5)


CAPTURED = {
    **SMALL,
    "dropout": f"{TESTS / 'tasks/checkpoint_tasks.py'}:ShakenTask",
    "tied": f"{TESTS / 'tasks/variety_tasks.py'}:TiedTask",
}


def check_graphs(plan, task, tmp_path, *, inline=True, **more):
    """Runs with graphs and without have the same bits. Returns what stages say of theirs."""
    for graphs in ("off", "on"):
        settings = RunSettings(task=task, device="cuda", deterministic=True, graphs=graphs, **more)
        with settings_put_back():
            summary = run(plan, settings, tmp_path / graphs, inline=inline)
    assert_close(tmp_path / "on", tmp_path / "off", 0.0)
    return [report.graphs for report in summary.stages]


@one_gpu
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *[("digits", variant) for variant in ALL],
        *itertools.product(CAPTURED, ["timeprest", "i-timeprest", "zb-h1"]),
    ],
)
def test_graphs_compute_what_is_computed_without(name, variant, profiles, tmp_path):
    # Layers with one weight are on one device.
    plan = plan_for(profiles(name), variant, 1 if name == "tied" else 2)
    for line in check_graphs(plan, CAPTURED[name], tmp_path, steps=8, eval_every=3):
        assert line.startswith("all passes are replayed")


@pytest.mark.processes
@one_gpu
@pytest.mark.parametrize("way", ["ipc", "gloo"])
@pytest.mark.parametrize("variant", ["timeprest", "pipedream-2bw", "zb-h1"])
def test_graphs_with_messages_between(variant, way, profiles, tmp_path):
    plan = plan_for(profiles("digits"), variant, 4, placement=(0, 1, 1, 0))
    for line in check_graphs(plan, "digits", tmp_path, inline=False, steps=8, transport=way):
        assert line.startswith("all passes are replayed")


@one_gpu
def test_a_capture_that_fails_leaves_the_gpu_as_it_was():
    """Torch's generator, its allocator and the stream go on."""
    device = torch.device("cuda", 0)
    found, x = capture.Capture(device), torch.randn(100, device=device)
    torch.manual_seed(0)
    wanted = torch.rand(3, device=device)

    def waits():
        """No operation of a tensor: only the device knows that it can't be captured."""
        with found.of(found.pool()):
            torch.rand(3, device=device)
            torch.cuda.current_stream().synchronize()

    def looks():
        with found.of(found.pool()):
            x.sum().item()

    for fails in (waits, looks):
        with pytest.raises((RuntimeError, capture.CannotCaptureError)):
            fails()
        torch.manual_seed(0)
        assert torch.equal(torch.rand(3, device=device), wanted)
        torch.cuda.empty_cache()
    with found.of(found.pool()) as graph:
        made = torch.rand(3, device=device)
    torch.manual_seed(0)
    graph.replay()
    assert torch.equal(made, wanted)
    assert float(x.sum()) == float(x.cpu().to(device).sum())


@one_gpu
@pytest.mark.parametrize("task", ["Masks", "Looks"])
def test_what_cant_be_captured_runs_without(task, tmp_path):
    target = f"{TESTS / 'runtime/stage/test_graphs.py'}:{task}"
    profile = measure(resolve(target), batch_size=8, micro_batch_sizes=[2, 8], seconds=0)
    for line in check_graphs(plan_for(profile, "timeprest", 1), target, tmp_path, steps=4):
        assert line.startswith("nothing is captured")
