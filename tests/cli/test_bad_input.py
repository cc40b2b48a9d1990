"""Bad input that was once taken badly: each has its one line now."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from fuzz.cases import CLUSTER, SPEC, TASK, fill, sound_run
from fuzz.commands import command_named, inside
from helpers.paths import TESTS
from timeprest.planner.cluster.cluster import read_cluster, uniform_cluster
from timeprest.planner.plan import Plan
from timeprest.profiles.device_specs import load_spec
from timeprest.profiles.errors import FileError, UserError
from timeprest.profiles.files import (
    MAX_TOML_BYTES,
    Kind,
    check_output,
    check_writable,
    ratio,
    read_file,
    read_toml,
    write_bytes,
)
from timeprest.profiles.profile import Profile
from timeprest.profiles.units import parse_bandwidth, parse_bytes, parse_memory, parse_seconds
from timeprest.runtime.settings import RunSettings


@pytest.fixture
def box(tmp_path):
    fill(tmp_path / "box")
    with inside(tmp_path / "box"):
        yield tmp_path / "box"


def call(tool, *words, code=2):
    """The line on stderr; or what is printed, with code 0."""
    result = CliRunner().invoke(command_named(tool), list(words), prog_name=tool)
    assert result.exit_code == code, (result.stderr, result.exception)
    if code == 0:
        return result.stdout
    (line,) = result.stderr.splitlines()
    return line


def edit(name, change):
    value = json.loads(Path(name).read_text())
    change(value)
    Path("broken.json").write_text(json.dumps(value))


def test_usage_errors_are_one_line(box):
    assert "--threads" in call("tp-profile", "digits", "--threads", "x")
    assert call("tp-run", "plan.json", "--epochs", "0").endswith("(see tp-run --help)")
    assert call("tp-plan", "solve").endswith("(see tp-plan solve --help)")
    assert "no such" in call("tp-plan", "sovle").lower()
    assert "Usage" in call("tp-plan", "solve", "--help", code=0)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400"])
@pytest.mark.parametrize(
    "words",
    [
        ("tp-plan", "solve", "profile.json", "--time-limit"),
        ("tp-plan", "solve", "profile.json", "--optimizer-state"),
        ("tp-run", "plan.json", "--optimizer", "sgd", "--lr"),
        ("tp-run", "plan.json", "--timeout"),
    ],
)
def test_options_take_finite_numbers(words, number, box):
    assert words[-1] in call(*words, number)


def test_a_name_in_a_file_stays_within_its_line(box):
    def rename(plan):
        plan["stages"][0]["nodes"][0] = "\x1b[2J\n" + "x" * 5000

    edit("plan.json", rename)
    line = call("tp-plan", "check", "broken.json", "--profile", "profile.json")
    assert "\x1b" not in line
    assert "\\x1b[2J" in line
    assert len(line) < 1100


def test_a_plan_that_isnt_the_models_is_named_by_its_file(box):
    edit("plan.json", lambda plan: plan["stages"][0]["nodes"].append("nowhere"))
    words = ("--inline", "--steps", "1", "--run-dir", "fresh")
    assert "broken.json: stages[0].nodes" in call("tp-run", "broken.json", *words)


def test_a_plan_names_its_task_as_seen_from_elsewhere(box):
    edit("plan.json", lambda plan: plan["profile"].update(target="gone.py:Task"))
    words = ("tp-run", "broken.json", "--inline", "--steps", "1", "--run-dir", "fresh")
    assert "no such file: gone.py; the plan names it as seen from the folder" in call(*words)
    # What the user named needs no such hint.
    assert call(*words, "--task", "no.py:Task").endswith("no.py:Task: no such file: no.py")


def test_names_that_are_no_text_are_printed(box):
    words = ("--devices", "1", "-o", "\udcff.json")
    assert "wrote \\udcff.json" in call("tp-plan", "solve", "profile.json", *words, code=0)


def test_no_more_processes_than_the_machine_bears(box):
    for words in (("digits", "--together"), ("--links", "--processes")):
        found = call("tp-profile", *words, "99999")
        assert "too many for this machine's" in found


def test_names_that_no_file_can_have(box):
    long = "a" * 5000
    assert "too long" in call("tp-plan", "solve", "profile.json", "-o", long)
    assert "too long" in call("tp-plan", "show", long)
    assert "no such target" in call("tp-profile", long)
    assert "no such file" in call("tp-profile", f"{'a' * 300}.py:task")
    run = ("tp-run", "plan.json", "--inline", "--steps", "1", "--run-dir")
    assert "too long" in call(*run, long)
    with pytest.raises(FileError, match=r"can't be (read|written)|no such"):
        read_file("a\0b", Profile)
    with pytest.raises(FileError, match="can't be written"):
        write_bytes("a\0b", b"")


def test_an_unwritable_result_is_said_before_the_work(box):
    (box / "file").write_text("")
    line = call("tp-plan", "solve", "profile.json", "-o", "file/plan.json")
    assert "file/plan.json: can't be written" in line
    with pytest.raises(FileError, match="is a folder"):
        check_writable(box)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("threads",), 100_000),
        (("batch_size",), 2**63),
        (("layers", 0, "parameter_bytes"), 10**30),
        (("layers", 0, "measurements", 0, "forward_s"), 1e300),
        (("storages", 0, "bytes_per_sample"), 1.7e308),
        (("edges", 0, "bytes_per_sample"), 1.7e308),
        (("optimizer", "state_bytes_per_parameter_byte"), 1e300),
    ],
)
def test_a_profile_holds_what_sums_can_be_made_of(path, value, box):
    def change(profile):
        place = profile
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    edit("profile.json", change)
    line = call("tp-plan", "solve", "broken.json")
    assert "broken.json" in line
    assert f"{path[-1]}`" in line


def test_a_plan_holds_what_sums_can_be_made_of(box):
    def slow(plan):
        plan["predicted"]["stages"][0]["forward_s"] = 1.7e308

    edit("plan.json", slow)
    assert "$.predicted.stages[0].forward_s" in call("tp-plan", "simulate", "broken.json")

    def large(plan):
        plan["edges"][0]["bytes_per_micro_batch"] = int("9" * 400)

    edit("plan.json", large)
    assert "$.edges[0].bytes_per_micro_batch" in call("tp-plan", "simulate", "broken.json")

    edit("plan.json", lambda plan: plan["profile"].update(threads=2**40))
    assert "$.profile.threads" in call("tp-run", "broken.json", "--inline")


def test_a_front_end_that_nobody_knows(box):
    edit("plan.json", lambda plan: plan["profile"].update(front_end="fX"))
    line = call("tp-run", "broken.json", "--inline", "--steps", "1", "--run-dir", "fresh")
    assert "broken.json: profile: front_end: 'fX' isn't one of fx," in line
    edit("profile.json", lambda profile: profile.update(front_end="fX"))
    assert "broken.json: front_end" in call("tp-plan", "solve", "broken.json")


def test_times_next_to_nothing(box):
    """The search would find no cut: half of 5e-324 is 0."""

    def shrink(seconds):
        def change(profile):
            for layer in profile["layers"]:
                for m in layer["measurements"]:
                    m |= {"forward_s": seconds, "backward_s": 0.0}

        edit("profile.json", change)

    shrink(5e-324)
    assert "layer 'l0': forward_s" in call("tp-plan", "solve", "broken.json")
    for seconds in (0.0, 1e-30):
        shrink(seconds)
        call("tp-plan", "solve", "broken.json", "--devices", "2", "-o", "out.json", code=0)
        read_file("out.json", Plan)
    shrink(0.0)
    more = ("--what-if", "devices=4", "-o", "out.json")
    assert "what if" in call("tp-plan", "solve", "broken.json", *more, code=0)
    assert parse_seconds("1e-320s") == 0
    assert ratio(1, 0) == ratio(1, 1e-320) == 0
    assert ratio(1, 4) == 0.25


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('memory = "1e308GiB"', "memory"),
        ('bandwidth = "1e300TB/s"', "bandwidth"),
        ('latency = "1e300s"', "latency"),
        ("speed = 1e300", "speed"),
        ("speed = inf", "speed"),
        ("processes = 10000000000", "processes"),
        ("count = 10000000000", "count"),
    ],
)
def test_a_cluster_holds_what_times_can_be_made_of(line, field, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(re.sub(rf"^{field} = .*$", line, CLUSTER, count=1, flags=re.M))
    with pytest.raises(UserError, match=rf"cluster\.toml.*{field}"):
        read_cluster(path)


def test_bandwidths_in_bits_and_in_bytes(tmp_path):
    for text, expected in {
        "100Mbit/s": 12.5e6,
        "1Gbit/s": 125e6,
        "10 Gbits/s": 1.25e9,
        "100Mbps": 12.5e6,
        "12 Mibit/s": 1.5 * 2**20,
        "12MB/s": 12e6,
        "1GBps": 1e9,
        "1.5GiB/s": 1.5 * 2**30,
        "4096": 4096.0,
    }.items():
        assert parse_bandwidth(text) == expected, text
    for text in ("10Gb/s", "10gb/s", "10b"):
        with pytest.raises(UserError, match=r"bits or bytes; write 10\w?bit/s or 10\w?B/s"):
            parse_bandwidth(text)
    for text in ("", "fast", "bit/s", "12apples/s", "1Xbit/s", "7bit/s", "0GB/s", "1e300Gbit/s"):
        with pytest.raises(UserError, match=r"^x\.y: "):
            parse_bandwidth(text, "x.y")
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.replace("12GB/s", "100Mbit/s").replace("1.5GB/s", "8Mbps"))
    cluster = read_cluster(path)
    assert cluster.network.bandwidth_bytes_per_s == 12.5e6
    assert cluster.between_machines.bandwidth_bytes_per_s == 1e6


def test_a_unit_that_was_forgotten_is_asked_for():
    for text in ("12", 12, "0x1", " 7.5 ", "999"):
        with pytest.raises(UserError, match=r"write its unit, as in [\d.]+GB/s|can't read"):
            parse_bandwidth(text)
        with pytest.raises(UserError, match=r"write its unit, as in [\d.]+GiB|can't read"):
            parse_memory(text)
    assert [parse_memory(text) for text in ("1000", "8B", 1 << 30)] == [1000, 8, 1 << 30]


@pytest.mark.parametrize(
    "words", [["tp-plan"], ["tp-plan", "solve"], ["tp-profile"], ["tp-run"], ["tp-run", "export"]]
)
def test_every_command_has_a_version(words):
    from timeprest import __version__

    assert call(*words, "--version", code=0) == f"{__version__}\n"


def test_a_plan_that_is_slower_than_one_device_says_so(box):
    """The profile's times are so short that messages over a slow link take longer."""
    slow = ("--devices", "2", "--stages", "2", "--bandwidth", "8kbit/s", "-o", "slow.json")
    commands = [
        ("solve", "profile.json", *slow),
        ("show", "slow.json"),
        ("check", "slow.json", "--profile", "profile.json"),
    ]
    for words in commands:
        done = CliRunner().invoke(command_named("tp-plan"), list(words), prog_name="tp-plan")
        (line,) = done.stderr.splitlines()
        speedup = read_file("slow.json", Plan).predicted.speedup
        assert "warning: slower than one device: " in line
        assert f"({1 / speedup:.2f} × as fast)" in line
        quiet = CliRunner().invoke(command_named("tp-plan"), [*words, "-q"], prog_name="tp-plan")
        assert (quiet.exit_code, quiet.output) == (0, "")
    call("tp-plan", "solve", "profile.json", "--devices", "1", "-o", "one.json", code=0)
    done = CliRunner().invoke(command_named("tp-plan"), ["show", "one.json"], prog_name="tp-plan")
    assert done.stderr == ""


def test_amounts_have_limits():
    for parse, text in (
        (parse_bytes, "1e300TB"),
        (parse_bandwidth, "1e300TB/s"),
        (parse_seconds, "1e300s"),
    ):
        with pytest.raises(UserError, match="is more than"):
            parse(text)
        with pytest.raises(UserError, match="is too large"):
            parse(f"1e{'9' * 5000}")
    with pytest.raises(UserError, match="memory"):
        uniform_cluster(1, "1e308GiB")


@pytest.mark.parametrize("line", ["launch_s = 1e9", 'memory_bytes = "1e300TB"'])
def test_a_spec_holds_what_times_can_be_made_of(line, tmp_path):
    field = line.split(" ")[0]
    path = tmp_path / "device.toml"
    path.write_text(re.sub(rf"^{field} = .*$", line, SPEC, flags=re.M))
    with pytest.raises(UserError, match=rf"device\.toml.*{field}"):
        load_spec(str(path))
    path.write_text(SPEC.replace("900GB/s", "1B/s"))
    with pytest.raises(UserError, match="memory_bandwidth"):
        load_spec(str(path))


def test_a_model_that_changes_its_dtype_is_reckoned_for_a_device_that_isnt_there(box):
    words = ("--device", "meta", "--spec", "v100-sxm2-32gb", "--batch-size", "4", "-q")
    assert call("tp-profile", TASK, *words, "-o", "out.json", code=0) == ""
    assert read_file("out.json", Profile).dtype == "float64"


def test_files_too_large_and_those_without_an_end_are_not_read(tmp_path):
    large = tmp_path / "large.json"
    large.touch()
    for kind, most in ((Profile, 64), (Plan, 32), (RunSettings, 1)):
        os.truncate(large, most * 2**20 + 1)
        with pytest.raises(FileError, match=rf"large\.json: larger than {most} MiB; not read"):
            read_file(large, kind)
    os.truncate(large, MAX_TOML_BYTES + 1)
    for read in (read_cluster, lambda path: read_toml(path, "")):
        with pytest.raises(FileError, match="larger than 1 MiB"):
            read(large)
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    for read in (read_cluster, load_spec, lambda path: read_file(path, Plan)):
        with pytest.raises(FileError, match="isn't a file"):
            read(str(pipe))


OUTPUTS = {
    "profile": "tp-profile profile.csv --batch-size 4 -o",
    "plan": "tp-plan solve profile.json --devices 2 -o",
    "checked": "tp-plan check plan.json --profile profile.json -o",
    "page": "tp-plan show plan.json --html",
    "figure": "tp-plan show plan.json --svg",
    "trace": "tp-plan show plan.json --trace",
    "run page": "tp-run report stopped -o",
    "run figure": "tp-run report stopped --svg",
    "run trace": "tp-run report stopped --trace",
    "model": "tp-run export stopped -o",
}


@pytest.fixture
def outputs(stopped):
    """A file of each kind that commands write."""
    columns = "layer,forward,backward,parameter bytes,activation bytes"
    Path("profile.csv").write_text(f"{columns}\na,1,2,8,8\n")
    for name, words in OUTPUTS.items():
        call(*words.split(), name, "-q", code=0)


def test_outputs_are_written_over_files_of_their_own_kind_alone(outputs):
    """A profile over a profile, a page over a page: whatever the file is called."""
    texts = ("task.py", "cluster.toml", "tensors", "page.html", "figure.svg", "notes")
    contents = (b"import os\n", CLUSTER.encode(), sound_run()["stopped/weights/stage0.safetensors"])
    contents += (b"<!DOCTYPE html><p>mine</p>", b"<svg/>", b"mine")
    for name, content in zip(texts, contents, strict=True):
        Path(name).write_bytes(content)
    kinds = {name: name.removeprefix("run ").replace("checked", "plan") for name in OUTPUTS}
    for name, words in OUTPUTS.items():
        for other in (*OUTPUTS, *texts):
            before = Path(other).read_bytes()
            if kinds.get(other) == kinds[name]:
                call(*words.split(), other, "-q", code=0)
                continue
            line = call(*words.split(), other, "-q")
            assert f"{other}: isn't overwritten: " in line
            assert "stands there, and this would be" in line
            assert Path(other).read_bytes() == before
    assert "a file of another kind stands there, and this would be a plan" in call(
        *OUTPUTS["plan"].split(), "task.py"
    )
    check_output("cluster.toml", Kind.CLUSTER)
    with pytest.raises(FileError, match="a plan stands there, and this would be a cluster file"):
        check_output("plan", Kind.CLUSTER)
    # Nothing is lost with these.
    Path("empty").touch()
    call(*OUTPUTS["plan"].split(), "empty", "-q", code=0)
    call(*OUTPUTS["plan"].split(), "/dev/null", "-q", code=0)


def test_a_runs_own_files_are_no_outputs(outputs):
    own = sorted(Path(name) for name in sound_run())
    before = [path.read_bytes() for path in own]
    for path in (*own, Path("stopped/weights/all.safetensors"), Path("stopped/summary.json")):
        for name in ("plan", "checked", "run page", "run trace", "run figure", "model"):
            assert "belongs to the run in" in call(*OUTPUTS[name].split(), str(path))
    assert [path.read_bytes() for path in own] == before
    call(*OUTPUTS["run page"].split(), "stopped/report.html", "-q", code=0)


@pytest.mark.parametrize(
    "own",
    [
        {"settings.json": b"{}", "lock": b"mine"},
        {"lock": b"mine"},
        {"plan.json": b"a plan of my house"},
        {"weights/stage0.safetensors": b"mine"},
        {"status": b"well"},
    ],
)
def test_a_folder_that_isnt_a_run_is_no_run_directory(own, box):
    for name, content in own.items():
        Path("mine", name).parent.mkdir(parents=True, exist_ok=True)
        Path("mine", name).write_bytes(content)
    words = ("plan.json", "--steps", "1", "--task", TASK, "-q", "--run-dir", "mine")
    for more in ("--inline", "--dry-run"):
        line = call("tp-run", *words, more)
        assert "mine: isn't a run directory, and a run would write over its own" in line
    found = {str(path.relative_to("mine")) for path in Path("mine").rglob("*") if path.is_file()}
    assert found == set(own)
    assert all(Path("mine", name).read_bytes() == content for name, content in own.items())


def test_a_run_begins_where_one_had_hardly_begun(box):
    """Its locks and settings are there, and no plan; a launcher's logs, too."""
    Path("hardly/logs/0").mkdir(parents=True)
    Path("hardly/lock").write_text("12 on host 0f3a")
    Path("hardly/lock.workers").touch()
    Path("hardly/settings.json").write_bytes(Path("run/settings.json").read_bytes())
    Path("hardly/notes.txt").write_text("mine")
    words = ("plan.json", "--inline", "--steps", "1", "--task", TASK, "-q", "--run-dir", "hardly")
    call("tp-run", *words, code=0)
    assert "holds a run already" in call("tp-run", *words)


def test_two_outputs_have_two_files(outputs):
    line = call("tp-plan", "show", "plan.json", "--html", "x", "--trace", "./x")
    assert "--html, --trace: both name" in line
    # All are looked at before the first is written.
    call("tp-plan", "show", "plan.json", "--html", "x", "--trace", "plan")
    assert not Path("x").exists()


def test_the_name_of_a_stream_stays_one(tmp_path):
    """What /dev/stdout leads to may be a file; the name isn't replaced by one."""
    with (tmp_path / "found").open("wb") as file:
        name = f"/proc/self/fd/{file.fileno()}"
        check_output(name, Kind.PLAN)
        write_bytes(name, b"{}")
    assert (tmp_path / "found").read_bytes() == b"{}"


EVIL = "\x1b[2J\r\n\x07\x9b5m\u202eevil\x7f"
STAGES, BRIEFLY = ("--devices", "3", "--stages", "2"), ("--time-limit", "0.1")


def test_names_move_no_cursor_and_end_no_line(box):
    """Of layers, targets, devices, files and run directories: in tables, pages and JSON."""
    text = Path("profile.json").read_text().replace('"l0"', json.dumps(f"l0{EVIL}"))
    profile = json.loads(text) | {"target": f"target{EVIL}", "refusals": [f"fx: {EVIL}"]}
    cluster = CLUSTER.replace('"big"', json.dumps(f"big{EVIL}"))
    plan, run = f"plan{EVIL}", f"stopped{EVIL}"
    Path(f"p{EVIL}").write_text(json.dumps(profile))
    Path(f"c{EVIL}").write_text(cluster.replace("\x7f", "\\u007F"))
    for name, content in sound_run().items():
        path = Path(run, Path(name).relative_to("stopped"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    Path("stopped").symlink_to(run)
    commands = [
        ("tp-plan", "solve", f"p{EVIL}", "--cluster", f"c{EVIL}", "-v", "-o", plan, *BRIEFLY),
        ("tp-plan", "solve", f"p{EVIL}", *STAGES, "-o", "other.json", *BRIEFLY),
        ("tp-plan", "check", plan, "--profile", f"p{EVIL}", "-o", plan),
        ("tp-plan", "show", plan, "--timeline", "-v", "--html", "page", "--svg", f"svg{EVIL}"),
        ("tp-plan", "show", plan, "--svg-memory", "svg", "--trace", "trace"),
        ("tp-plan", "show", plan, "--json"),
        ("tp-plan", "compare", plan, "other.json", "-v"),
        ("tp-run", "report", run, "-o", f"page{EVIL}"),
        ("tp-run", "report", run, "stopped", "--json"),
        ("tp-run", "export", run, "-o", f"model{EVIL}"),
        (*START[:-2], "--run-dir", f"run{EVIL}"),
        ("tp-run", "plan.json", "--task", TASK, "--run-dir", f"dry{EVIL}", "--dry-run"),
    ]
    for words in commands:
        said = call(*words, code=0)
        assert said.replace("\n", "").isprintable(), words
        assert "evil" in said or "--dry-run" in words, words
    # An SVG with control characters is no XML; a page shows them as nothing.
    for name in ("page", f"page{EVIL}", "svg", f"svg{EVIL}"):
        assert not set(Path(name).read_text()) & set("\x1b\x07\x9b\u202e\x7f"), name
    for words in (
        ("tp-plan", "show", EVIL),
        ("tp-run", f"x{EVIL}.json"),
        ("tp-profile", f"x{EVIL}.py:Task"),
        ("tp-run", "--resume", "--run-dir", EVIL),
        ("tp-plan", "solve", "profile.json", "--pin", f"{EVIL}=1"),
    ):
        assert call(*words).isprintable()


RESUME = ("tp-run", "--resume", "--run-dir", "stopped", "--inline", "-q")
REPORT = ("tp-run", "report", "stopped", "-q")
START = ("tp-run", "plan.json", "--task", TASK, "--inline", "--steps", "1", "--from", "stopped")
READERS = (RESUME, REPORT, ("tp-run", "export", "stopped", "-o", "out", "-q"), START)


@pytest.fixture
def stopped(box):
    """A run that was stopped after its checkpoint at 2."""
    for name, content in sound_run().items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    return box / "stopped"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"\0" * len(text),
        lambda text: b"\xff" + text[1:],
        lambda text: b'{"kind": "\xff"}\n' + text,
        lambda text: b"[1, 2]\n" + text,
        lambda text: b'{"kind": "epoch"}\n' + text,
        lambda text: b'{"kind": "mini_batches", "epoch": 0, "losses": 3}\n' + text,
        lambda text: b"[" * 10_000 + b"\n" + text,
        lambda text: text.replace(b"mini_batches", b"mini_botches"),
    ],
)
def test_damaged_metrics_are_refused_before_anything_is_changed(damage, stopped):
    metrics = stopped / "metrics.jsonl"
    metrics.write_bytes(damage(metrics.read_bytes()))
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    assert "metrics.jsonl: line 1: " in call(*REPORT)
    line = call(*RESUME)
    assert "metrics.jsonl: line 1: " in line
    assert "put the file back as it was, or start another run from the weights" in line
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_metrics_that_are_cut_short_are_refused(stopped):
    os.truncate(stopped / "metrics.jsonl", 9)
    assert "metrics.jsonl: has 9 bytes, and had " in call(*RESUME)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "zero", "folder", "large"])
def test_what_has_no_end_is_read_nowhere(kind, stopped):
    """In the place of every file of a run; a command that needs it says which."""
    make = {
        "pipe": os.mkfifo,
        "zero": lambda path: path.symlink_to("/dev/zero"),
        "folder": Path.mkdir,
        "large": lambda path: (path.touch(), os.truncate(path, 2**42)),
    }[kind]
    place = stopped / "checkpoints/00000002"
    read = {
        "settings.json": (RESUME, REPORT),
        "plan.json": (RESUME, REPORT, START),
        "metrics.jsonl": (RESUME, REPORT),
        "stages/stage0.jsonl": (REPORT,),
        "recorded/stage0.jsonl": (REPORT,),
        "weights/stage0.safetensors": () if kind in ("folder", "large") else (RESUME,),
        "checkpoints/00000002/checkpoint.json": READERS[2:],
        "checkpoints/00000002/weights/stage0.safetensors": READERS[2:],
        "checkpoints/00000002/state/stage0.json": (RESUME, READERS[2]),
    }
    for name, commands in read.items():
        path = stopped / name
        content = path.read_bytes()
        path.unlink()
        make(path)
        for words in commands:
            more = ("--run-dir", "fresh") if words is START else ()
            if words is START and name == "plan.json":
                continue
            assert f"{path.name}: " in call(*words, *more)
        path.rmdir() if kind == "folder" else path.unlink()
        path.write_bytes(content)
    assert place.is_dir()
    assert not Path("fresh").exists()
    call(*RESUME, code=0)


@pytest.mark.timeout(60)
def test_a_pipe_is_no_text_to_train_on(box):
    os.mkfifo("words.txt")
    assert "words.txt: isn't a file" in call("tp-profile", "text:words.txt", "--seconds", "0")


def test_a_device_is_written_to_and_stays_one(monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("would replace the device"))
    write_bytes("/dev/null", b"{}")


def test_reading_a_plan_imports_nothing(box):
    """The user's code is imported from the target that the user names, when it is run."""
    (box / "trap.py").write_text("open('sprung', 'w')\n")
    for name in ("plan.json", "profile.json"):
        value = json.loads((box / name).read_text())
        (value["profile"] if name == "plan.json" else value)["target"] = "trap.py:task"
        (box / name).write_text(json.dumps(value))
    call("tp-plan", "show", "plan.json", code=0)
    call("tp-plan", "simulate", "plan.json", code=0)
    call("tp-plan", "check", "plan.json", "--profile", "profile.json", code=0)
    call("tp-plan", "solve", "profile.json", "-o", "out.json", code=0)
    # A task of the user's own choice instead of the plan's.
    run = ("plan.json", "--inline", "--steps", "1", "--run-dir", "fresh", "--task", TASK, "-q")
    call("tp-run", *run, code=0)
    assert not (box / "sprung").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_what_cannot_be_printed_is_said(box):
    """On a full device; a reader that has had enough is no failure, and can be told nothing."""

    def ended(out, err, *words):
        tool = Path(sys.executable).parent / "tp-plan"
        done = subprocess.run([tool, *words], stdout=out, stderr=err)
        return done.returncode, (done.stderr or b"").decode()

    unread, written = os.pipe()
    os.close(unread)
    line = "tp-plan: what it prints can't be written: No space left on device\n"
    with open("/dev/full", "w") as full, os.fdopen(written, "w") as closed:
        assert ended(full, subprocess.PIPE, "show", "plan.json") == (1, line)
        assert ended(full, subprocess.PIPE, "--help") == (1, line)
        assert ended(full, full, "show", "nothing.json") == (2, "")
        assert ended(closed, subprocess.PIPE, "show", "plan.json") == (0, "")


def test_a_task_that_goes_to_another_folder_takes_no_output_along(box):
    (box / "elsewhere").mkdir()
    task = f"{TESTS / 'tasks/failing_tasks.py'}:GoesElsewhere"
    call("tp-profile", task, "--batch-size", "8", "-q", "-o", "mine.json", code=0)
    assert (box / "mine.json").exists()
    assert not list((box / "elsewhere").iterdir())
