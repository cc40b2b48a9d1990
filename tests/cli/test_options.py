"""What all commands' options share: their help, and completion by the shell."""

from __future__ import annotations

import re
import shlex

import click
import pytest
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete
from click.testing import CliRunner
from helpers.output.commands import commands_below
from timeprest.cli.plan import main as plan_main
from timeprest.cli.profile import main as profile_main
from timeprest.cli.run import main as run_main
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles import plugins

PROGRAMS = {"tp-profile": profile_main, "tp-plan": plan_main, "tp-run": run_main}
COMMANDS = {
    "tp-profile": profile_main,
    "tp-plan": plan_main,
    "tp-run": run_main,
    **{f"tp-plan {name}": command for name, command in commands_below(plan_main).items()},
    **{f"tp-run {name}": command for name, command in commands_below(run_main).items()},
}
LARGE = ("tp-profile", "tp-plan solve", "tp-run", "tp-run study")


def help_of(name):
    program, *words = name.split()
    done = CliRunner().invoke(PROGRAMS[program], [*words, "--help"], prog_name=program)
    assert done.exit_code == 0, done.output
    return done.output


# Help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_every_option_once_and_ranges_that_mean_something(name):
    text = help_of(name)
    assert "RANGE" not in text
    assert not re.search(r"\[default:[^]]*\]\s+\[default:", text)
    assert set(re.findall(r"\d<=?x<=?[^\]]*", text)) <= {"0<x<1", "0<=x<1", "0<x<=1", "0<=x<=1"}
    shown = text.split("Examples:")[0]
    for option in COMMANDS[name].params:
        if isinstance(option, click.Option):
            lines = re.findall(
                rf"^  (?:-\w, |--[\w-]+, )*{option.opts[-1]}\b[ /]", shown + " ", re.M
            )
            assert len(lines) == 1, option.opts


def test_an_importers_option_without_its_file_says_what_it_goes_with():
    for target, why in (
        ("costs.csv", "--model: costs.csv has no such option"),
        ("digits", "--model: goes with a file that is imported; digits is none"),
    ):
        done = CliRunner().invoke(profile_main, [target, "--model", "x"], prog_name="tp-profile")
        assert done.exit_code == 2
        assert re.fullmatch(rf".*: {why}\n", done.output)


@pytest.mark.parametrize("name", LARGE)
def test_options_are_in_groups_of_a_few(name):
    text = help_of(name).split("Examples:")[0]
    groups = re.split(r"^(\S.*):$", text, flags=re.M)[1:]
    names, bodies = groups[::2], groups[1::2]
    assert len(names) == len(set(names)) >= 4
    assert names[-1] == "General options"
    for body in bodies:
        assert 1 <= len(re.findall(r"^  -", body, re.M)) <= 12


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_that_can_be_given(name):
    text = help_of(name)
    lines = [line.strip() for line in text.split("Examples:\n")[1].splitlines()]
    assert 2 <= len(lines) <= 3
    for line in lines:
        program, *words = shlex.split(line)
        first = COMMANDS.get(f"{program} {words[0]}")
        assert name in (program, f"{program} {words[0]}")
        (first or COMMANDS[program]).make_context(program, words[1:] if first else words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("tp-run plan.json --epochs 0", "0 is less than 1"),
        ("tp-run plan.json --steps 2000000000000", "is more than 1099511627776"),
        ("tp-run plan.json --lr 0", "0 isn't above 0"),
        ("tp-run plan.json --lr nan", "'nan' isn't a finite number"),
        ("tp-run plan.json --momentum nan", "'nan' isn't a finite number"),
        ("tp-run plan.json --momentum 1", "1.0 is not in the range 0<=x<1"),
        ("tp-plan solve p.json --time-limit -1", "-1 is less than 0"),
        ("tp-plan solve p.json --time-limit 1e300", "1e+300 is more than 1e+09"),
        ("tp-profile digits --threads x", "'x' is not a valid integer"),
    ],
)
def test_what_is_out_of_range_is_said(words, why):
    program, *rest = words.split()
    done = CliRunner().invoke(PROGRAMS[program], rest, prog_name=program)
    assert done.exit_code == 2
    assert why in done.output


# Completion ----------------------------------------------------------------------------------


def completed(line):
    """What the shell is offered for a line's last word: values, and types of what it knows."""
    program, *words = shlex.split(line)
    last = "" if line.endswith(" ") else words.pop()
    complete = ShellComplete(PROGRAMS[program], {}, program, "_X_COMPLETE")
    found = complete.get_completions(words, last)
    plain = [item.value for item in found if item.type == "plain"]
    return plain, [item.type for item in found if item.type != "plain"]


@pytest.mark.parametrize(
    ("line", "values", "types"),
    [
        ("tp-plan s", ["show", "simulate", "solve"], []),
        ("tp-plan solve profile.json --variant ", [*VARIANTS, "all"], []),
        ("tp-plan solve --variant gp", ["gpipe"], []),
        ("tp-plan solve --placement ", ["auto", "straight", "loop", "v"], []),
        ("tp-plan solve --sequence ", ["best", "listed"], []),
        ("tp-plan solve --between-l", ["--between-latency"], []),
        ("tp-plan solve pro", [], ["file"]),
        ("tp-plan solve --cluster ", [], ["file"]),
        ("tp-plan compare a.json ", [], ["file"]),
        ("tp-profile resnet1", ["resnet101", "resnet152", "resnet18"], ["file"]),
        ("tp-profile ", sorted(plugins.names("tasks")), ["file"]),
        ("tp-profile digits --device ", ["cpu", "cuda", "meta"], []),
        ("tp-run ", ["export", "report", "study"], ["file"]),
        ("tp-run pl", [], ["file"]),
        ("tp-run plan.json --checkp", ["--checkpoint-every"], []),
        ("tp-run plan.json --task di", ["digits"], ["file"]),
        ("tp-run --resume --run-dir ", [], ["dir"]),
        ("tp-run report ", [], ["dir"]),
        ("tp-run report runs/first --tr", ["--trace"], []),
        ("tp-run export runs/first -o ", [], ["file"]),
        ("tp-run study plan.json --lr-schedule c", ["constant", "cosine"], []),
        ("tp-run study plan.json ", [], ["file"]),
    ],
)
def test_shells_complete(line, values, types):
    assert completed(line) == (values, types)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("shell", [BashComplete, ZshComplete, FishComplete])
def test_the_commands_answer_a_shell(program, shell, monkeypatch):
    """Through their own main: what a shell sources, and what it then asks."""
    name = f"_{program.replace('-', '_')}_COMPLETE".upper()
    monkeypatch.setattr(BashComplete, "_check_version", staticmethod(lambda: None))
    done = CliRunner().invoke(
        PROGRAMS[program], [], prog_name=program, env={name: f"{shell.name}_source"}
    )
    assert done.exit_code == 0
    assert f"{name}={shell.name}_complete" in done.output
    words = {"COMP_WORDS": f"{program} --ver", "COMP_CWORD": "1" if shell.name != "fish" else ""}
    if shell.name == "fish":
        words["COMP_CWORD"] = "--ver"
    done = CliRunner().invoke(
        PROGRAMS[program], [], prog_name=program, env={name: f"{shell.name}_complete", **words}
    )
    assert done.exit_code == 0
    assert "--version" in done.output


# Configuration -------------------------------------------------------------------------------


def configured(tmp_path, name, text, *words):
    path = tmp_path / "run.toml"
    path.write_text(text)
    program, *rest = name.split()
    line = [*rest, "x.json", "--config", str(path), *words]
    return CliRunner().invoke(PROGRAMS[program], line, prog_name=program)


@pytest.mark.parametrize("name", LARGE)
def test_a_printed_configuration_can_be_given_back(name, tmp_path):
    first = configured(tmp_path, name, "", "--print-config")
    assert first.exit_code == 0, first.output
    # Whatever the command is for.
    program, *rest = name.split()
    bare = CliRunner().invoke(PROGRAMS[program], [*rest, "--print-config"], prog_name=program)
    assert bare.output == first.output
    again = configured(tmp_path, name, first.output, "--print-config")
    assert again.output == first.output


def test_one_value_of_an_option_that_takes_several_needs_no_list(tmp_path):
    for text in ('pin = "fc=1"', 'pin = ["fc=1"]'):
        done = configured(tmp_path, "tp-plan solve", text, "--print-config")
        assert 'pin = ["fc=1"]' in done.output.splitlines()
    done = configured(tmp_path, "tp-plan solve", "pin = [[1]]")
    assert "pin: [1]: give text or a number" in done.output


def test_every_long_name_of_an_option_is_a_key(tmp_path):
    for key in ("between", "between-bandwidth", "between_bandwidth"):
        done = configured(tmp_path, "tp-plan solve", f"{key} = '1GB/s'", "--print-config")
        assert 'between-bandwidth = "1GB/s"' in done.output.splitlines()
    done = configured(tmp_path, "tp-plan solve", "between = '1GB/s'\nbetween-bandwidth = '1GB/s'")
    assert "is there twice" in done.output


def test_the_command_line_wins(tmp_path):
    text = "epochs = 7\nlr = 1\ncheckpoint_every = 4\ncheckpoint-every = 4\n"
    done = configured(tmp_path, "tp-run", text)
    assert "is there twice" in done.output
    text = "epochs = 7\nlr = 1\nseed = 3\nevaluate = false\n"
    done = configured(tmp_path, "tp-run", text, "--steps", "2", "--lr", "0.5", "--print-config")
    for line in ("steps = 2", "lr = 0.5", "seed = 3", "evaluate = false", "# epochs: 5"):
        assert line in done.output.splitlines()


def test_what_a_file_of_options_has_wrong_is_told_with_its_name(mlp_profile, tmp_path):
    """As far as the command line doesn't say otherwise."""
    config, profile = tmp_path / "my.toml", tmp_path / "profile.json"
    mlp_profile.save(profile)
    config.write_text("variant = 'gpipee'\nstages = 9\ndevices = 2\n")
    for more, line in (
        ([], f"{config}: unknown system 'gpipee'; known are"),
        (["--variant", "gpipe"], f"{config}: --stages 9: the cluster has only 2 devices"),
        (["--variant", "gpipe", "--stages", "8"], "--stages 8: the cluster has only 2"),
    ):
        words = ["solve", str(profile), "--config", str(config), *more]
        result = CliRunner().invoke(plan_main, words)
        assert result.exit_code == 2
        assert result.stderr.split(": ", 1)[1].startswith(line)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("plan.json --dry-run --inline", "--dry-run: looks at what workers' processes need"),
        ("plan.json --dry-run --check", "--dry-run: goes with neither --resume nor --check"),
        ("--dry-run --resume --run-dir run", "--dry-run: goes with neither --resume nor --check"),
        ("--dry-run --resume-at 4 --run-dir run", "--dry-run: goes with neither"),
        ("--check --resume --run-dir run", "--check: trains anew; leave --from and --resume out"),
        ("plan.json --check --from run", "--check: trains anew; leave --from and --resume out"),
        ("--resume --from other --run-dir run", "--resume, --from: give one of them"),
        ("plan.json --check --max-restarts 2", "--max-restarts: a check isn't started again"),
        ("plan.json --dry-run --max-restarts 2", "--max-restarts: a dry run isn't started again"),
    ],
)
def test_two_things_instead_of_training_leave_each_other_out(words, why, tmp_path, monkeypatch):
    """Before anything is looked at: neither plan nor run is there."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(run_main, words.split())
    assert done.exit_code == 2
    assert why in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_cluster_file_and_a_number_of_devices_leave_each_other_out(tmp_path):
    """On the command line; what is said of links beside a cluster's file stays refused."""
    text = 'devices = 3\nmemory = "1GiB"\nhalf_duplex = true\nmini_batch = 8\n'
    asked = ("--cluster", "c.toml", "--print-config")
    shown = configured(tmp_path, "tp-plan solve", text, *asked).output.splitlines()
    for line in ('cluster = "c.toml"', "half-duplex = false", "mini-batch = 8"):
        assert line in shown
    assert any(line.startswith("# memory: none") for line in shown)
    assert not [line for line in shown if line.startswith("devices")]
    text = 'cluster = "c.toml"\n'
    asked = ("--devices", "3", "--print-config")
    shown = configured(tmp_path, "tp-plan solve", text, *asked).output.splitlines()
    assert 'devices = "3"' in shown
    assert not [line for line in shown if line.startswith("cluster")]
    kept = configured(tmp_path, "tp-plan solve", text, "--memory", "1GiB", "--print-config")
    assert 'cluster = "c.toml"' in kept.output.splitlines()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("epoch = 3", "epoch: tp-run has no such option; did you mean epochs?"),
        ("epochs = 'x'", "epochs: 'x': give a whole number"),
        ("epochs = 0", "epochs: 0 is less than 1"),
        ("epochs = true", "epochs: True: give a whole number"),
        ("inline = 1", "inline: 1: give true or false"),
        ("on-nan = 'go'", "on-nan: 'go' is not one of"),
        ("[lr]", "lr: {}: give a number"),
        ("lr = ", "not valid TOML"),
    ],
)
def test_what_is_wrong_in_a_file_names_it_and_the_key(text, why, tmp_path):
    done = configured(tmp_path, "tp-run", text)
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1
    assert f"{tmp_path / 'run.toml'}: {why}" in done.output
