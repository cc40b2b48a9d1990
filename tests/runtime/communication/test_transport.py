"""How messages go, and that those which go through pinned memory arrive as they were sent."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from helpers.drawn.pipelines import ALL
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from helpers.processes.pinned_memory_worker import LateCopier
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles import plugins
from timeprest.profiles.errors import UserError
from timeprest.runtime import run as running
from timeprest.runtime.communication import pinned_memory
from timeprest.runtime.communication.channel import LocalChannels, PeerError
from timeprest.runtime.communication.pinned_memory import PinnedMemoryChannels
from timeprest.runtime.communication.transport import (
    GLOO,
    NCCL,
    PINNED,
    WorkerPlace,
    all_places,
    short_of_memory,
    shortage_here,
    transport_of,
)
from timeprest.runtime.prepare.devices import check_kind, device_kind, device_of
from timeprest.runtime.processes import launcher as launch
from timeprest.runtime.processes.environment import launched_by
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.settings import RunSettings, settings_of
from timeprest.runtime.verify.findings import gpu_checks

# Rules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "transport"),
    [
        ([("a", ""), ("a", "")], GLOO),
        ([("a", "g0"), ("a", "g1")], NCCL),
        ([("a", "g0"), ("b", "g0")], NCCL),
        ([("a", "g0")], NCCL),
        ([("a", "g0"), ("a", "g0")], PINNED),
        ([("a", "g0"), ("a", "g1"), ("a", "g0")], PINNED),
    ],
)
def test_nccl_wants_a_gpu_for_each_worker(gpus, transport):
    assert transport_of(gpus) == transport


@pytest.mark.parametrize(
    ("kind", "workers", "gpus", "transport"),
    [("cpu", 4, 8, GLOO), ("cuda", 4, 4, NCCL), ("cuda", 4, 8, NCCL), ("cuda", 4, 3, PINNED)],
)
def test_on_one_host_it_goes_by_the_gpus(kind, workers, gpus, transport):
    devices = [device_of(kind, rank, gpus) for rank in range(workers)]
    found = [("here", str(device) if kind == "cuda" else "") for device in devices]
    assert transport_of(found) == transport


def test_local_ranks_go_round_the_gpus():
    assert [str(device_of("cuda", rank, 2)) for rank in range(4)] == ["cuda:0", "cuda:1"] * 2
    assert device_of("cpu", 3, 2) == torch.device("cpu")


@pytest.mark.parametrize(
    ("profiled", "device", "kind"),
    [
        ("cpu", "auto", "cpu"),
        ("cuda", "auto", "cuda"),
        ("meta:a10", "auto", "cpu"),
        ("cuda", "cpu", "cpu"),
        ("cpu", "cuda", "cuda"),
    ],
)
def test_a_plan_runs_on_what_it_was_profiled_on(profiled, device, kind, mlp_profile):
    import msgspec

    profile = msgspec.structs.replace(with_times(mlp_profile), device=profiled)
    plan = plan_by_hand(profile, "timeprest", 2, 2)
    assert device_kind(plan, RunSettings(task="x", device=device)) == kind


def test_a_run_that_has_no_gpu_is_refused_in_a_line():
    check_kind("cpu", RunSettings(task="x"), 0)
    check_kind("cuda", RunSettings(task="x"), 1)
    with pytest.raises(UserError, match=r"^--device cuda: torch finds no GPU here"):
        check_kind("cuda", RunSettings(task="x", device="cuda"), 0)
    with pytest.raises(UserError, match=r"profiled on cuda.*--device cpu"):
        check_kind("cuda", RunSettings(task="x"), 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_is_written_for_it(mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2)
    with pytest.raises(UserError, match="no GPU here"):
        running.run(plan, RunSettings(task=mlp_target, device="cuda"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_nor_for_messages_of_gpus_on_the_cpu(way, mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2)
    with pytest.raises(UserError, match=f"^--transport {way}: is of GPUs, and stages are on the C"):
        running.run(plan, RunSettings(task=mlp_target, transport=way), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_local_rank_comes_from_the_launcher():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}
    assert launched_by(torchrun).local_rank == 1
    srun = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}
    srun |= {"SLURM_LOCALID": "3", "MASTER_ADDR": "a"}
    assert launched_by(srun).local_rank == 3


def place(name, gpu, sure, free, host="a"):
    return WorkerPlace(
        rank=0,
        name=name,
        host=host,
        device="cuda:0",
        gpu=gpu,
        free_bytes=free,
        sure_bytes=sure,
        planned_bytes=2 * sure,
    )


def test_workers_that_share_a_gpu_share_its_memory():
    both = [place("stage 0", "g0", 600, 1000), place("stage 1", "g0", 600, 990)]
    (line,) = short_of_memory(both)
    assert line.startswith(
        "stage 0 and stage 1: weights, gradients and optimizer state need 1.2 KiB"
    )
    assert "990 B are free" in line
    apart = [place("stage 0", "g0", 600, 1000), place("stage 1", "g1", 600, 1000)]
    assert short_of_memory(apart) == []
    other_host = [place("stage 0", "g0", 600, 1000), place("stage 1", "g0", 600, 1000, "b")]
    assert short_of_memory(other_host) == []
    on_cpu = [place("stage 0", "", 10**15, 1)]
    assert short_of_memory(on_cpu) == []


def test_all_workers_hear_of_it():
    import msgspec

    short = place("stage 0", "g0", 600, 100)
    text = msgspec.json.encode(short)
    with pytest.raises(UserError, match=r"stage 0: weights.*600 B.*100 B are free; end what else"):
        all_places(place("stage 1", "g1", 1, 100), lambda mine: [text, mine])
    fits = place("stage 0", "g0", 60, 100)
    assert all_places(fits, lambda mine: [mine]) == (fits,)


def test_on_the_cpu_there_is_a_warning():
    assert shortage_here([400, 600], 1000) is None
    warning = shortage_here([500, 600], 1000)
    assert "1.1 KiB are more than the 1000 B of memory" in warning


def test_a_dry_run_adds_up_what_is_on_each_gpu():
    shared = [place("stage 0", "g0", 50, 50), place("stage 2", "g0", 50, 40)]
    first, second = gpu_checks([shared[0], place("stage 1", "g1", 50, 70), shared[1]])
    assert (first.gpu, first.planned_bytes, first.free_bytes) == ("cuda:0", 200, 40)
    assert (second.planned_bytes, second.free_bytes) == (100, 70)


# NCCL's sequences ---------------------------------------------------------------------------------


class Watched(LocalChannels):
    """Notes what is sent, and what both ends expect."""

    sent: dict
    posted: dict
    wanted: dict

    def open(self, series, posts):
        self.due, self.handed_in = {}, 0
        for after, route, kind in posts(self.rank):
            sends = route.ends(kind)[0] == self.rank
            both = self.posted if sends else self.wanted
            both.setdefault(route.between(kind), []).append((route.number, kind))
            if sends:
                self.due.setdefault((route.number, kind), []).append(after)

    def advance(self):
        self.handed_in += 1
        # What is due has been made.
        assert not any(after <= self.handed_in for due in self.due.values() for after in due)

    def send(self, route, kind, tensor, *, kept=False):
        super().send(route, kind, tensor, kept=kept)
        if not route.handed_over:
            self.sent.setdefault(route.between(kind), []).append((route.number, kind))
            assert self.due[route.number, kind].pop(0) > self.handed_in


@pytest.fixture
def watched(monkeypatch):
    for name in ("sent", "posted", "wanted"):
        monkeypatch.setattr(Watched, name, {}, raising=False)
    monkeypatch.setattr("timeprest.runtime.communication.opening.LocalChannels", Watched)

    def check():
        assert Watched.posted == Watched.wanted
        every = {pair: sorted(found) for pair, found in Watched.sent.items()}
        assert every == {pair: sorted(found) for pair, found in Watched.wanted.items()}
        return Watched.sent

    return check


@pytest.mark.choice(18)
@pytest.mark.slow
@pytest.mark.parametrize("variant", ALL)
@pytest.mark.parametrize("replicas", [[1, 1, 1], [2, 1, 2], [1, 2, 1]])
def test_both_ends_know_the_sequence_of_messages(
    variant, replicas, mlp_profile, mlp_target, tmp_path, watched
):
    """What NCCL delivers without a name is what the receiver takes it for."""
    n = 1 if VARIANTS[variant].whole_mini_batches else 4
    plan = plan_by_hand(with_times(mlp_profile), variant, 3, n, replicas=replicas)
    settings = RunSettings(task=mlp_target, steps=4, checkpoint_every=2)
    running.run(plan, settings, tmp_path / "run", inline=True)
    assert watched()


@pytest.mark.parametrize("variant", ["timeprest", "gpipe", "zb-h1", "pipedream-2bw"])
def test_also_where_workers_have_several_stages(
    variant, mlp_profile, mlp_target, tmp_path, watched
):
    """Of two stages of a worker, each sends and receives apart from the other."""
    plan = plan_by_hand(with_times(mlp_profile), variant, 4, 4, placement=(0, 1, 1, 0))
    running.run(plan, RunSettings(task=mlp_target, steps=4), tmp_path / "run", inline=True)
    between = {(source.stage, target.stage) for source, target in watched()}
    assert between == {(0, 1), (1, 0), (2, 3), (3, 2)}


@pytest.mark.parametrize("variant", ["timeprest", "gpipe", "pipedream-2bw"])
def test_also_where_a_stage_sends_several_tensors(variant, tmp_path, watched):
    from timeprest.profiles.measuring.measure import measure
    from timeprest.profiles.target import resolve

    target = f"{TESTS / 'tasks/variety_tasks.py'}:SkipsTask"
    profile = measure(resolve(target), batch_size=8, micro_batch_sizes=[2, 4, 8], seconds=0)
    plan = plan_by_hand(with_times(profile), variant, 3, 4)
    running.run(plan, RunSettings(task=target, steps=2), tmp_path / variant, inline=True)
    assert any(len(set(numbers)) > 1 for numbers in watched().values())


# Through pinned memory ----------------------------------------------------------------------------


class HostChannels:
    """Channels that keep what is sent."""

    def __init__(self):
        self.sent = []
        self.held_bytes = 0

    def send(self, route, kind, tensor):
        self.sent.append((route, kind, tensor.clone()))

    def throttle(self, most):
        assert most == 0

    def end(self):
        pass


class Held:
    """A copy that lands when it is let."""

    def __init__(self):
        self.lands = threading.Event()
        self.error = None

    def synchronize(self):
        assert self.lands.wait(10)
        if self.error:
            raise self.error


class HeldCopier(LateCopier):
    def __init__(self):
        self.landing = Held()

    def down(self, tensor):
        return tensor.clone(), self.landing


def test_a_message_is_sent_when_its_copy_has_landed(monkeypatch):
    """And whoever sends a large one waits for nothing."""
    monkeypatch.setattr(pinned_memory, "AT_ONCE_BYTES", 15)
    host, copier = HostChannels(), HeldCopier()
    channels = PinnedMemoryChannels(host, copier, 0.2)
    tensor = torch.ones(4)
    channels.send("c", "F", tensor)
    assert channels.held_bytes == 16
    assert host.sent == []
    with pytest.raises(PeerError, match=r"copy from the GPU took over 0\.2 s"):
        channels.close()
    copier.landing.lands.set()
    channels.close()
    assert [route for route, _, _ in host.sent] == ["c"]
    assert channels.held_bytes == 0
    channels.end()


def test_a_small_message_is_sent_at_once_unless_others_are_ahead_of_it(monkeypatch):
    monkeypatch.setattr(pinned_memory, "AT_ONCE_BYTES", 8)
    host, copier = HostChannels(), HeldCopier()
    channels = PinnedMemoryChannels(host, copier, 10)
    channels.send("large", "F", torch.ones(4))
    channels.send("small", "F", torch.ones(2))
    assert host.sent == []
    copier.landing.lands.set()
    channels.close()
    channels.send("again", "F", torch.ones(2))
    assert [route for route, _, _ in host.sent] == ["large", "small", "again"]
    channels.end()


@pytest.mark.parametrize("at_once", [0, 16])
def test_a_copy_that_fails_ends_the_run(at_once, monkeypatch):
    monkeypatch.setattr(pinned_memory, "AT_ONCE_BYTES", at_once)
    host, copier = HostChannels(), HeldCopier()
    channels = PinnedMemoryChannels(host, copier, 10)
    copier.landing.error = RuntimeError("illegal memory access")
    copier.landing.lands.set()

    def sent():
        channels.send("c", "F", torch.ones(4))
        channels.close()

    with pytest.raises(PeerError, match="couldn't be copied from the GPU: illegal memory access"):
        sent()


@pytest.mark.choice(0)
@pytest.mark.processes
@pytest.mark.parametrize(("variant", "replicas"), [("timeprest", [2, 1]), ("zb-h1", [1, 1])])
def test_a_run_through_pinned_memory_is_the_inline_run(
    variant, replicas, mlp_profile, mlp_target, tmp_path, monkeypatch
):
    """Messages, gradient sums and evaluation; bit for bit."""
    here = str(TESTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    plan = plan_by_hand(with_times(mlp_profile), variant, 2, 2, replicas=replicas)
    settings = RunSettings(task=mlp_target, steps=4)
    running.run(plan, settings, tmp_path / "inline", inline=True)
    monkeypatch.setattr(launch, "WORKER", "helpers.processes.pinned_memory_worker")
    summary = running.run(plan, settings, tmp_path / "staged")
    assert {report.transport for report in summary.stages} == {PINNED}
    found, wanted = load_weights(tmp_path / "staged"), load_weights(tmp_path / "inline")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


MINE = """
import tempfile
from pathlib import Path

from timeprest.runtime.communication.gloo import GlooChannels


class Mine(GlooChannels):
    def __init__(self, made):
        super().__init__(made.names, made.timeout_s, made.status, varying=made.varying)
        if made.rank == 0:
            made.store.set("folder", tempfile.mkdtemp(dir=Path(__file__).parent))
        folder = Path(made.store.get("folder").decode())
        (folder / made.names[made.rank]).touch()


TRANSPORTS = {"mine": Mine}
"""


@pytest.mark.processes
@pytest.mark.usefixtures("plugins_forgotten")
def test_plugins_have_other_transports(mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2)
    asked = {"task": mlp_target, "steps": 3, "transport": "mine"}
    with pytest.raises(UserError, match=r"transport 'mine': give one of auto, gloo, .* nccl$"):
        settings_of(plan, asked)
    (tmp_path / "mine.py").write_text(MINE)
    plugins.load_file(str(tmp_path / "mine.py"))
    settings = settings_of(plan, asked)
    running.run(plan, RunSettings(task=mlp_target, steps=3), tmp_path / "inline", inline=True)
    summary = running.run(plan, settings, tmp_path / "run")
    assert {report.transport for report in summary.stages} == {"mine"}
    # They have agreed on a folder.
    (folder,) = (path for path in tmp_path.iterdir() if path.name.startswith("tmp"))
    assert len([*folder.iterdir()]) == 2
    found, wanted = load_weights(tmp_path / "run"), load_weights(tmp_path / "inline")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
