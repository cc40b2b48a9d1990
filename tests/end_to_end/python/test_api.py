"""What `import timeprest` offers takes what the commands take, and does what they do."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction

import msgspec
import numpy as np
import pytest
import timeprest
import torch
from click.testing import CliRunner
from helpers.by_hand.profiles import chain
from helpers.by_hand.studies import PLAIN_ARM, arm, study
from helpers.plans import with_times
from timeprest import Cluster
from timeprest.cli.plan import main as plan_main
from timeprest.cli.profile import main as profile_main
from timeprest.cli.run import main as run_main
from timeprest.planner.cluster.cluster import read_cluster, uniform_cluster
from timeprest.planner.cluster.link_fit import LinkPoint
from timeprest.planner.plan import read_plan
from timeprest.profiles.errors import InfeasibleError, UserError
from timeprest.profiles.files import write_file
from timeprest.profiles.profile import Together
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.study.figures.study import write_study

OF_THE_TERMINAL = {"as_json", "quiet", "verbose", "version", "path", "config_path", "print_config"}
"""Options about what is printed and written."""


class Missing:
    """As pandas' NA: whether it equals anything can't be said."""

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")

    def __repr__(self):
        return "<NA>"


MISSING = Missing()


def options_of(command):
    return {p.name: p for p in command.params} if command is not None else {}


@pytest.mark.parametrize(
    ("function", "command", "others", "elsewhere"),
    [
        (
            "profile",
            profile_main,
            {},
            {
                "links": "links",
                "processes": "links.processes",
                "machines": "links.machines",
                "plugins": "plugin.path",
            },
        ),
        (
            "plan",
            plan_main.commands["solve"],
            {
                "profile_path": "profile",
            },
            {
                "study_path": "plans.study",
                "what_if": "what_if.changes",
                "front": "front",
                "plugins": "plugin.path",
            },
        ),
        (
            "run",
            run_main,
            {"plan_path": "plan"},
            # The training's are fields of `RunSettings`.
            {
                "checks": "check",
                "dry_run": "dry_run",
                "resume": "resume",
                "resume_at": "resume.at",
                "plugins": "plugin.path",
            },
        ),
    ],
)
def test_python_takes_what_the_command_takes(function, command, others, elsewhere):
    """With the same defaults, where both have one."""
    parameters = inspect.signature(getattr(timeprest, function)).parameters
    fields = {f.name: f for f in msgspec.structs.fields(RunSettings)}
    for name, option in options_of(command).items():
        if name in OF_THE_TERMINAL:
            continue
        if name in elsewhere:
            other, _, parameter = elsewhere[name].partition(".")
            found = inspect.signature(getattr(timeprest, other)).parameters
            assert not parameter or parameter in found, name
            continue
        own = others.get(name, name)
        if function == "run" and own not in parameters:
            # Those of the optimizer are fields of the one that is chosen.
            of_optimizer = {f.name for f in msgspec.structs.fields(OptimizerChoice)}
            assert own in fields or own in of_optimizer, own
            continue
        assert own in parameters, own
        default, other = parameters[own].default, option.default
        plain = isinstance(other, (str, int, float)) and not isinstance(other, bool)
        if plain and other != "auto" and default is not inspect.Parameter.empty:
            assert default == other, own


def test_what_resume_takes_is_what_run_takes():
    shared = {"epochs", "steps", "task", "inline", "callbacks", "max_restarts"}
    for name in ("run", "resume"):
        assert shared <= set(inspect.signature(getattr(timeprest, name)).parameters)


def test_python_plans_as_the_command_does(tmp_path):
    """Replicas are allowed, and devices that share a machine slow each other down."""
    profile = msgspec.structs.replace(chain(4), together=Together(processes=2, slowdown=1.5))
    write_file(tmp_path / "profile.json", profile)
    alike, slower = tmp_path / "alike.toml", tmp_path / "slower.toml"
    alike.write_text("[[devices]]\ncount = 2\n")
    slower.write_text("[[devices]]\n[[devices]]\nspeed = 0.5\n")
    for words, given in (
        ([], {}),
        (["--replicas", "off", "--stages", "2"], {"replicas": False, "stages": 2}),
        (["--cluster", str(alike)], {"cluster": alike}),
        (["--cluster", str(slower)], {"cluster": slower}),
        (
            ["--devices", "3", "--memory", "1GiB", "--pin", "n3=1"],
            {"devices": 3, "memory": "1GiB", "pins": {"n3": 1}},
        ),
        (
            ["--variant", "gpipe", "--recompute", "on", "--update-every", "2", "--no-overlap"],
            {"variant": "gpipe", "recompute": "on", "update_every": 2, "overlap": False},
        ),
    ):
        command = ["solve", str(tmp_path / "profile.json"), "-q", "-o", str(tmp_path / "plan.json")]
        done = CliRunner().invoke(plan_main, [*command, *words])
        assert done.exit_code == 0, done.output
        found, wanted = timeprest.plan(profile, **given), read_plan(tmp_path / "plan.json")
        assert found.stages == wanted.stages
        assert found.cluster == wanted.cluster
        assert found.predicted == wanted.predicted
        speeds = [1.0, 0.5] if "cluster" in given and given["cluster"] == slower else None
        contended = [round(1 / 1.5, 4)] * len(found.cluster.devices)
        assert [d.speed for d in found.cluster.devices] == (speeds or contended)


def test_what_cant_be_planned_or_run_is_refused(mlp_profile, tmp_path):
    cluster = uniform_cluster(2)
    with pytest.raises(UserError, match="leave out devices, memory"):
        timeprest.plan(mlp_profile, cluster, devices=3, memory="1GiB")
    with pytest.raises(UserError, match="replicas: give True or False, not 'maybe'"):
        timeprest.plan(mlp_profile, cluster, replicas="maybe")
    for name in ("stages", "micro_batches", "stages_per_device"):
        with pytest.raises(UserError, match=f"{name} 'many': give auto or a whole number from 1"):
            timeprest.plan(mlp_profile, cluster, **{name: "many"})
    plan = timeprest.plan(mlp_profile, cluster, stages=2, replicas=False)
    for settings, words in (
        ({"epoch": 3}, "epoch"),
        ({"ragged": "fold"}, "ragged"),
        ({"optimizer": {"name": "adam"}}, "lr"),
        ({"seed": object()}, "seed <object.*: give a whole number from 0"),
        ({"lr_schedule": 3}, "lr_schedule: give a name in quotes, not 3"),
        ({"optimizer": {"name": "sgd", "lr": object()}}, "settings: <object.*: give a number"),
    ):
        with pytest.raises(UserError, match=words):
            timeprest.run(plan, tmp_path / "run", inline=True, **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"memory": -1}, "memory: can't read"),
        ({"memory": 0}, "memory: must be more than 0, not 0"),
        ({"memory": True}, "memory: can't read True"),
        ({"memory": 10**5000}, "memory: such a large number is too large; write it like 16GiB"),
        (
            {"devices": 10**5000},
            "devices: give a whole number .*, not such a large number",
        ),
        ({"bandwidth": [1]}, r"bandwidth: can't read \[1\]; write it like 12GB/s"),
        ({"latency": float("nan")}, "latency: can't read 'nan'"),
        ({"devices": "0"}, "devices: give a whole number from 1 to 65536, not '0'"),
        ({"devices": "two"}, "devices: give a number of devices, or kinds: a100-80gb:8, .*'two'"),
        ({"devices": 0}, "devices: give a whole number from 1 to 65536, not 0"),
        ({"devices": 4, "per_machine": 2.0}, "per_machine: give a whole number from 1 to 65536"),
        ({"devices": MISSING}, "devices: give a whole number from 1 to 65536, not <NA>"),
        ({"memory": MISSING}, "memory: can't read <NA>; write it like 16GiB"),
        ({"memory": np.ones((2, 2))}, "memory: can't read array"),
        ({"cluster": uniform_cluster(2), "memory": MISSING}, "leave out memory"),
        (
            {"stages": np.array([1, 2])},
            r"stages array\(\[1, 2\]\): give auto or a whole number from 1",
        ),
        ({"mini_batch": MISSING}, "mini_batch <NA>: give a whole number from 1"),
        (
            {"optimizer_state": np.ones(2)},
            "optimizer_state array.*: give a number from 0 as 2 for Adam, or muon",
        ),
        ({"replicas": np.array([1, 2])}, r"replicas: give True or False, not array\(\[1, 2\]\)"),
        ({"replicas": None}, "replicas: give True or False, not None"),
        (
            {"variant": ["gpipe", "zb-v"]},
            "variant: give one system's name, not 2; timeprest.plans takes several",
        ),
        ({"variant": "all"}, "variant: give one system's name, not 18; timeprest.plans takes"),
        ({"variant": None}, "variant: give one or more such as 'gpipe', not None"),
        ({"objective": "loss"}, "objective loss: goes with study, a study of this model"),
        ({"objective": "period", "study": "s.json"}, "study: is for objective loss"),
        ({"objective": "speed"}, "objective 'speed': give one of period, loss"),
        ({"seen": 3}, "seen: give a function of a plan, not 3"),
        ({"tied": ["split"]}, r"tied: give a name in quotes, not \['split'\]"),
        ({"tied": np.array(["split"])}, "tied: give a name in quotes"),
        ({"placement": ["loop"]}, "placement: give a name in quotes"),
        ({"sequence": None}, "sequence: give a name in quotes"),
        ({"recompute": True}, "recompute: give a name in quotes, not True"),
        ({"solver": np.array(["dp", "ilp"])}, "solver: give a name in quotes"),
        ({"overlap": 1}, "overlap: give True or False, not 1"),
        ({"devices": 2.0}, "devices: give a whole number from 1 to 65536, not 2.0"),
        ({"overlap": "no"}, "overlap: give True or False, not 'no'"),
        ({"overlap": None}, "overlap: give True or False, not None"),
        ({"half_duplex": 2}, "half_duplex: give True or False, not 2"),
        ({"mini_batch": 8.0}, "mini_batch 8.0: give a whole number from 1"),
        ({"mini_batch": 0}, "mini_batch 0: give a whole number from 1"),
        ({"micro_batches": 2.0}, "micro_batches 2.0: give auto or a whole number from 1"),
        ({"stages": 0}, "stages 0: give auto or a whole number from 1"),
        ({"update_every": "2"}, "update_every '2': give a whole number from 1"),
        ({"time_limit_s": "1"}, "time_limit_s '1': give a number from 0"),
        ({"time_limit_s": np.float32("nan")}, "time_limit_s .*nan.*: give a number from 0"),
        ({"time_limit_s": float("inf")}, "time_limit_s inf: give a number from 0"),
        ({"time_limit_s": 10**400}, "time_limit_s 10+…: give a number from 0"),
        ({"time_limit_s": Decimal("sNaN")}, "time_limit_s Decimal.*: give a number from 0"),
        ({"memory": np.float64("inf")}, "memory: can't read 'inf'"),
        ({"bandwidth": Decimal("NaN")}, "bandwidth: can't read 'nan'"),
        ({"latency": Fraction(10**400)}, "latency: can't read 'nan'"),
        ({"bandwidth": 2j}, "bandwidth: can't read 2j"),
        ({"devices": np.float64(2)}, "devices: give a whole number from 1 to 65536"),
        ({"devices": np.bool_(True)}, "devices: give a whole number from 1 to 65536"),
        ({"optimizer_state": "adam"}, "optimizer_state 'adam': give a number from 0 as 2 for Adam"),
        ({"optimizer_state": float("nan")}, "optimizer_state nan: give a number from 0"),
        ({"pins": {"l3": "1"}}, r"pins\['l3'\] '1': give a whole number from 0"),
        ({"pins": {"l3": -1}}, r"pins\['l3'\] -1: give a whole number from 0"),
        ({"pins": 3}, "pins: give each layer's stage by its name"),
        ({"pins": ["l3"]}, "pins 'l3': give NAME=STAGE, as in pins layer3=1; 0 is the first"),
        ({"between_latency": "1ms"}, "per_machine: say how many devices a machine has"),
        ({"per_machine": 2, "between_latency": "1ms"}, "per_machine: .*, fewer than all, to give"),
        ({"pins": {"l0": 1}, "stages": 2}, "can't be cut as asked with --pin l0=1: no stage may"),
        ({"tied": "apart"}, "tied 'apart': give one of auto, together, split"),
        ({"order": 3}, "order: give the name of a file, not int"),
        ({"device": 2}, "device: there is no such argument; is devices meant"),
        ({"x": 2}, "x: there is no such argument; known: profile, cluster, "),
        ({"cluster": 3}, "cluster: give a Cluster, or the name of its file, not int"),
        ({"profile": None}, "profile: give a Profile, or the name of its file, not NoneType"),
        ({"profile": "none.json"}, "none.json: no such file"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_it(given, why, mlp_profile):
    with pytest.raises(UserError, match=why) as refused:
        timeprest.plan(**{"profile": mlp_profile, **given})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"batch_size": 0}, "batch_size 0: give a whole number from 1"),
        ({"batch_size": 4.0}, "batch_size 4.0: give a whole number from 1"),
        ({"micro_batch_sizes": 4}, "micro_batch_sizes: give a list of them, not 4"),
        ({"micro_batch_sizes": [0, 4]}, "micro_batch_sizes 0: give a whole number from 1"),
        (
            {"batch_size": 4, "micro_batch_sizes": [8]},
            "micro_batch_sizes: 8 is more than the mini-batch of 4",
        ),
        ({"threads": 0}, "threads 0: give a whole number from 1"),
        ({"seconds": "3"}, "seconds '3': give a number from 0"),
        ({"relative_error": -1}, "relative_error -1: give a number above 0 to 1"),
        ({"batches": 0}, "batches 0: give a whole number from 1"),
        ({"together": 1}, "together 1: give a whole number from 2"),
        ({"front_end": "jit"}, "front_end 'jit': give one of fx"),
        ({"granularity": 3}, "granularity: give a name in quotes, not 3"),
    ],
)
def test_what_cant_be_measured_is_one_line_too(given, why, mlp_target):
    with pytest.raises(UserError, match=why):
        timeprest.profile(mlp_target, **given)


@pytest.mark.parametrize(
    ("function", "given", "why"),
    [
        ("plans", {"variants": 3}, "variants: give one or more such as 'gpipe', not 3"),
        ("plans", {"variants": [["gpipe"]]}, "variants: give one or more such as 'gpipe'"),
        ("plans", {"variants": np.array(3)}, "variants: give one or more"),
        ("plans", {"variants": np.array([])}, "variants: name one system or more"),
        ("plans", {"variant": "gpipe"}, "variant: timeprest.plans takes the systems as variants="),
        ("plans", {"device": 2}, "device: there is no such argument; is devices meant"),
        ("front", {"device": 2}, "device: there is no such argument; is devices meant"),
        ("what_if", {"changes": "memory=1GiB", "device": 2}, "device: there is no such argument"),
        ("plans", {"seen": print}, "seen: is for timeprest.plan"),
        ("what_if", {"changes": None}, "changes: give one or more such as 'bandwidth=2x"),
        ("what_if", {"changes": [3]}, r"changes: give one or more such as .+, not \[3\]"),
        ("what_if", {"changes": "memory=1GiB", "variant": "all"}, "variant: give one system's"),
    ],
)
def test_of_several_plans_a_wrong_argument_is_named_too(function, given, why, mlp_profile):
    with pytest.raises(UserError, match=why) as refused:
        getattr(timeprest, function)(mlp_profile, **given)
    assert "\n" not in str(refused.value)


def test_amounts_may_be_numbers():
    numbers = {"memory": 2**30, "bandwidth": 2e9, "latency": 1e-3, "between_bandwidth": 10**9}
    texts = {"memory": "1GiB", "bandwidth": "2GB/s", "latency": "1ms", "between_bandwidth": "1GB/s"}
    machines = {"devices": 4, "per_machine": 2, "stages": 2}
    found, wanted = (timeprest.plan(chain(4), **machines, **a) for a in (numbers, texts))
    assert found.cluster == wanted.cluster
    assert found.stages == wanted.stages


def test_numbers_may_be_those_of_other_libraries():
    theirs = {
        "devices": np.int64(4),
        "per_machine": np.int32(2),
        "memory": Decimal(2**30),
        "bandwidth": np.float32(2e9),
        "latency": Fraction(1, 1000),
        "between_bandwidth": np.float64(1e9),
        "half_duplex": np.bool_(True),
        "optimizer_state": np.float32(1),
        "time_limit_s": np.int64(60),
        "update_every": np.int64(2),
        "stages": np.int16(2),
    }
    own = {
        name: bool(n) if name == "half_duplex" else float(n) if float(n) % 1 else int(n)
        for name, n in theirs.items()
    }
    found, wanted = (timeprest.plan(chain(4), **numbers) for numbers in (theirs, own))
    assert found.cluster == wanted.cluster
    assert found.predicted == wanted.predicted
    assert found.optimizer_state_factor == 1
    msgspec.json.decode(msgspec.json.encode(found), type=type(found))


def test_files_may_be_named(mlp_profile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mlp_profile.save("profile.json")
    (tmp_path / "cluster.toml").write_text('[[devices]]\ncount = 2\nmemory = "1GiB"\n')
    cluster = Cluster.load("cluster.toml")
    assert cluster == read_cluster("cluster.toml")
    how = {"stages": 2, "replicas": False}
    wanted = timeprest.plan(mlp_profile, cluster, **how)
    found = timeprest.plan("profile.json", tmp_path / "cluster.toml", **how)
    assert (found.stages, found.cluster) == (wanted.stages, cluster)
    # One system, one change and one file, where there may be several.
    (one,) = timeprest.plans("profile.json", "cluster.toml", variants="gpipe", **how).values()
    assert one.variant == "gpipe"
    (after,) = timeprest.what_if("profile.json", "memory=2x", "cluster.toml", **how).values()
    assert after.cluster.devices[0].memory_bytes == 2**31
    given = {"variants": np.array(["gpipe", "pipedream"]), **how}
    assert list(timeprest.plans("profile.json", "cluster.toml", **given)) == ["gpipe", "pipedream"]
    given = {"variant": np.str_("gpipe"), "tied": np.str_("split"), **how}
    assert timeprest.plan("profile.json", "cluster.toml", **given).tied == "split"
    with pytest.raises(UserError, match="variants: name one system or more"):
        timeprest.plans(mlp_profile, variants=[])
    found.save("plan.json")
    run = timeprest.run("plan.json", "run", steps=1, inline=True, evaluate=False)
    assert run.plan.stages == found.stages
    assert timeprest.dry_run(tmp_path / "plan.json", "other").problems == ()


def test_python_trains_with_the_settings_given(mlp_profile, tmp_path):
    plan = timeprest.plan(mlp_profile, stages=2, replicas=False)
    found = timeprest.run(
        plan,
        tmp_path / "run",
        steps=np.int64(3),
        inline=True,
        optimizer={"name": "sgd", "lr": np.float64(0.125)},
        evaluate=False,
    )
    assert found.summary.mini_batches == 3
    assert found.epochs[-1].lr == 0.125
    more = timeprest.resume(tmp_path / "run", steps=5, inline=True)
    assert more.summary.mini_batches == 5
    weights = tmp_path / "run"
    assert timeprest.run(plan, tmp_path / "on", steps=1, inline=True, start_from=weights).losses
    with pytest.raises(UserError, match="seed: a resumed run keeps its settings"):
        timeprest.resume(tmp_path / "run", seed=3)
    for change, why in (
        ({"device": "gpu"}, "device 'gpu': give one of auto, cpu, cuda"),
        ({"record": "x"}, "--record x"),
        ({"steps": "7"}, "steps '7': give a whole number from 1"),
        ({"task": object()}, "task: the run's is .*:MLPTask, found by that name; leave task out"),
    ):
        with pytest.raises(UserError, match=why):
            timeprest.resume(tmp_path / "run", **{"steps": 7, "inline": True, **change})
    assert more.settings.device == "auto"
    for change, why in (
        ({"lr": 0.1}, "lr: is the optimizer's: optimizer="),
        ({"optimizer": "adam"}, "optimizer: give its name and settings, .*, not 'adam'"),
        ({"decay": "exp"}, "decay 'exp': give one of exponential, inverse, linear"),
        ({"autocast": "float16"}, "autocast 'float16': give one of profiled, bfloat16, off"),
        ({"callbacks": None}, "callbacks: give a list of them, not NoneType"),
        ({"epoch": 2}, "epoch: there is no such setting; is epochs meant"),
        ({"rate": 0.1}, "rate: there is no such setting; known: task, epochs"),
        # A run's own, which no option gives.
        ({"dropout": False}, "dropout: there is no such setting"),
        ({"resume_at": 2}, "resume_at: there is no such setting"),
    ):
        with pytest.raises(UserError, match=why):
            timeprest.run(plan, tmp_path / "none", steps=1, inline=True, **change)
    with pytest.raises(UserError, match="run_dir None: give a path"):
        timeprest.run(plan, None, steps=1, inline=True)
    assert not (tmp_path / "none").exists()


def test_python_checks_and_looks_before_a_run(mlp_profile, tmp_path):
    plan = timeprest.plan(mlp_profile, stages=2, replicas=False, variant="gpipe")
    assert timeprest.check(plan, inline=True, steps=2).verdict == "same"
    with pytest.raises(UserError, match="--check: trains anew"):
        timeprest.check(plan, inline=True, start_from=str(tmp_path))
    with pytest.raises(UserError, match="epochs: a check trains steps mini-batches"):
        timeprest.check(plan, inline=True, epochs=1)
    with pytest.raises(UserError, match="epochs, steps: give one of them"):
        timeprest.dry_run(plan, tmp_path / "run", epochs=1, steps=1)
    found = timeprest.dry_run(plan, tmp_path / "run")
    assert [cut.source for cut in found.cuts]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "use",
    [
        lambda plan, place: timeprest.run(plan, place / "run", steps=2, inline=True),
        lambda plan, place: timeprest.check(plan, inline=True, steps=1),
        lambda plan, place: timeprest.dry_run(plan, place / "dry"),
        lambda plan, place: timeprest.export(plan, "torch", place / "exported"),
    ],
    ids=["run", "check", "dry_run", "export"],
)
def test_a_session_is_left_as_it_was(use, mlp_profile, tmp_path):
    """Torch's threads and random numbers."""
    plan = timeprest.plan(mlp_profile, stages=2, replicas=False, variant="gpipe")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        state = torch.manual_seed(5).get_state()
        use(plan, tmp_path)
        assert torch.get_num_threads() == threads + 1
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(threads)


def test_threads_train_one_after_another(mlp_profile, tmp_path):
    plan = timeprest.plan(mlp_profile, stages=2, replicas=False, variant="gpipe")

    def losses(number):
        return timeprest.run(plan, tmp_path / str(number), steps=40, inline=True).losses

    state = torch.manual_seed(5).get_state()
    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(losses, range(6))
    assert others == 5 * [first]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_run_that_measures_in_a_callback_trains_as_without(mlp_profile, mlp_target, tmp_path):
    plan = timeprest.plan(mlp_profile, stages=2, replicas=False, variant="gpipe")

    class Measures(timeprest.Callback):
        def on_epoch(self, event):
            timeprest.profile(target=mlp_target, batch_size=8, seconds=0)

    runs = [
        timeprest.run(
            plan, tmp_path / str(len(callbacks)), epochs=2, inline=True, callbacks=callbacks
        )
        for callbacks in ([], [Measures()])
    ]
    assert runs[0].losses == runs[1].losses


def test_python_measures_links(monkeypatch, tmp_path):
    """What the command would write, read back."""
    from timeprest.runtime.calibration import links

    def measured(processes, device, progress):
        sizes = (64, 2**16, 2**20, 2**24)
        times = tuple(
            LinkPoint(message_bytes=n, seconds=1e-4 + n / 1e9, error=0.01, repetitions=9)
            for n in sizes
        )
        return links.LinkTimes(
            processes=processes,
            device=device,
            backend="gloo",
            pairs=(times,) * (processes - 1),
            all_reduce=times,
        )

    monkeypatch.setattr(links, "measure_links", measured)
    found = timeprest.links(tmp_path / "cluster.toml", processes=2)
    assert len(found.devices) == 2
    assert found == read_cluster(tmp_path / "cluster.toml")


def test_python_says_what_changes_would_bring():
    """As the command does: on devices that slow each other down, and each change by itself."""
    costs = chain(4, parameters=1000)
    profile = msgspec.structs.replace(costs, together=Together(processes=2, slowdown=1.5))
    how = {"variant": "pipedream", "devices": 2}
    changes = ["devices=3,memory=1GiB", "memory=1KiB"]
    found = timeprest.what_if(profile, changes, **how)
    wanted = timeprest.plan(profile, variant="pipedream", devices=3, memory="1GiB")
    assert list(found) == changes[:1]
    assert found[changes[0]].predicted == wanted.predicted
    assert found[changes[0]].cluster == wanted.cluster
    # What was proven holds by the profile.
    assert found[changes[0]].solver.checksum == wanted.solver.checksum
    cluster = wanted.cluster
    (same,) = timeprest.what_if(profile, ["devices=3"], cluster, variant="pipedream").values()
    assert same.cluster == cluster
    with pytest.raises(InfeasibleError, match="memory=1KiB: "):
        timeprest.what_if(profile, changes[1:], **how)


def test_python_plans_every_system(mlp_profile, tmp_path, monkeypatch):
    """As the command does, with a study and without."""
    monkeypatch.chdir(tmp_path)
    profile = with_times(mlp_profile)
    how = {"devices": 2, "bandwidth": "100MB/s", "variants": ("v-timeprest", "pipedream")}
    found = timeprest.plans(profile, **how)
    assert list(found) == ["v-timeprest", "pipedream"]
    wanted = timeprest.plan(profile, variant="pipedream", devices=2, bandwidth="100MB/s")
    assert found["pipedream"].stages == wanted.stages
    arms = [PLAIN_ARM, arm("v-timeprest", (9, 9, 9)), arm("pipedream", (1.1, 1.2, 1.0))]
    made = study(arms, dict.fromkeys(found, 1.0), plans=found, mini_batch=profile.batch_size)
    write_study("study.json", made)
    judged = timeprest.plans(profile, study="study.json", **how)
    assert set(judged) == set(found)
    # A plan of one stage trains plainly; else a mini-batch of the other takes nine times as many.
    best = next(iter(judged.values()))
    assert best.variant == "pipedream" or len(best.stages) == 1
    with pytest.raises(UserError, match="is a study of mini-batches"):
        timeprest.plans(profile, study="study.json", mini_batch=2)
    with pytest.raises(InfeasibleError, match="pipedream: "):
        timeprest.plans(profile, variants=["pipedream"], memory="1KiB")


def test_a_front_from_the_least_stale_on(mlp_profile):
    how = {"devices": 3, "stages": 3, "micro_batches": 1, "replicas": False}
    found = timeprest.front(mlp_profile, **how)
    differences = [plan.predicted.version_difference for plan in found]
    assert differences == sorted(set(differences))
    assert differences[0] == 0
    (fresh,) = timeprest.front(mlp_profile, max_difference=0, **how)
    assert fresh.stages == found[0].stages
    with pytest.raises(UserError, match="max_difference 'none': give a whole number from 0"):
        timeprest.front(mlp_profile, max_difference="none", **how)
