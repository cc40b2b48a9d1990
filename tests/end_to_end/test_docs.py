"""The docs are true: their Python runs, and their commands, options and files exist."""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import re
import shlex
import shutil
import sys
import textwrap
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import msgspec
import pytest
import timeprest
import torch
from click.testing import CliRunner
from helpers.drawn import cases
from helpers.output.commands import commands_below
from helpers.output.doc_pages import (
    ROOT,
    Text,
    blocks,
    commands,
    names_beside_files,
    names_defined,
    pages,
    section,
    spans,
    tables,
)
from helpers.paths import SHIPPED_DEVICES
from helpers.plans import chain_plan, plan_by_hand, with_times
from rich.console import Console
from timeprest.cli.options.config import read_config
from timeprest.cli.plan import main as plan_main
from timeprest.cli.profile import main as profile_main
from timeprest.cli.run import main as run_main
from timeprest.cli.tables.stages import stage_table
from timeprest.planner.cluster.cluster import read_cluster, uniform_cluster
from timeprest.planner.exports.torch_pipelining import _TEXT as SCRIPT_TEXT
from timeprest.planner.exports.torch_pipelining import SCRIPT
from timeprest.planner.plan import Plan, PlanStage, SolverReport, read_plan
from timeprest.planner.systems.variants import VARIANTS, load_plugin
from timeprest.profiles import plugins
from timeprest.profiles.device_specs import load_spec
from timeprest.profiles.files import RUN_OWN, read_toml, tomllib, write_file
from timeprest.profiles.profile import Layer, Measurement, Profile
from timeprest.profiles.tasks.task import read_loss
from timeprest.runtime.records.callbacks import Callback
from timeprest.runtime.records.recording import Line
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.tests.benchmarks.published.command import published
from torch.distributed.run import get_args_parser

PROGRAMS = {"tp-profile": profile_main, "tp-plan": plan_main, "tp-run": run_main}
PAGES = {str(page.relative_to(ROOT)): page for page in pages()}
PLACES = {
    "A": "a.json",
    "B": "b.json",
    "FILE": "model.safetensors",
    "HOST": "localhost",
    "NAME=STAGE": "a=0",
    "PLAN": "plan.json",
    "PROFILE": "profile.json",
    "RUN": "runs/first",
    "TARGET": "digits",
    **dict.fromkeys(("K", "N", "T", "X", "k"), "2"),
}
"""What stands for something of the reader's own, and one such thing."""
FOLDERS = ("profiles", "planner", "runtime", "cli", "tests")
OF_OTHERS = {
    "--activation_compression_ratio",
    "--adaptive_momentum",
    "--rdzv-conf",
    "--requeue",
    "--straight_pipeline",
}
"""Options of other programs that pages name."""


# Commands ------------------------------------------------------------------------------------


def words_of(text):
    """A command line's words, with something in each place that is the reader's own."""
    words = shlex.split(text, comments=True)
    words = [PLACES.get(word, word) for word in words]
    before = [None, *words]
    shown = zip(before, words, strict=False)
    return [("timeprest" if b == "--variant" else "2") if w == "…" else w for b, w in shown]


def subcommand(command, words):
    """The command that the words are of."""
    if isinstance(command, click.Group):
        return command.get_command(click.Context(command), words[0])
    return command


def parse(program, words, *, in_text=False):
    """Let click read the words; the options they set. Raises click.ClickException.

    Args:
        in_text: arguments and the last option's value may be left out, as in ``tp-plan solve
            --variant all`` and ``tp-profile --together``.
    """
    command = PROGRAMS[program]
    if words[:1] == ["--plugin"] and words[1].startswith("tests/"):
        load_plugin(str(ROOT / words[1]))
        words = words[2:]
    for option in ("--config", "--plugin"):
        if option in words:
            # The reader's own file isn't here; that the command takes one is seen.
            at = words.index(option)
            assert any(option in o.opts for o in subcommand(command, words).params)
            words = [*words[:at], *words[at + 2 :]]
    try:
        if isinstance(command, click.Group):
            if not words or words[0].startswith("-"):
                return command.make_context(program, list(words)).params
            found = command.get_command(click.Context(command), words[0])
            if found is None:
                raise click.UsageError(f"{program} has no command {words[0]!r}")
            return found.make_context(words[0], list(words[1:])).params
        return command.make_context(program, list(words)).params
    except click.exceptions.Exit:
        return {}
    except click.MissingParameter as error:
        if in_text and isinstance(error.param, click.Argument):
            return {}
        raise
    except click.BadOptionUsage as error:
        if in_text and error.option_name == words[-1]:
            return {}
        raise


def check_command(words, *, in_text=False):
    """Raise AssertionError or click.ClickException for a command that can't be given."""
    program, *rest = words
    if program in PROGRAMS:
        parse(program, rest, in_text=in_text)
    elif program == "torchrun":
        check_torchrun(rest)
    elif program == "make":
        (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
        asked = {word for word in rest if "=" not in word}
        assert asked <= set(targets.split()), f"make has no {asked - set(targets.split())}"
    elif program in ("sudo", "srun"):
        inner = next(k for k, w in enumerate(rest) if w in PROGRAMS or "python" in w)
        check_command(rest[inner:])
    elif program.endswith(("python", "python3")):
        check_script(rest)
    else:
        assert program in ("export", "pip"), f"what is {program}?"


def check_torchrun(words):
    """Torchrun's own parser takes the words, and what it starts is a command, or what `tp-plan
    export` wrote."""
    parser = get_args_parser()
    parser.error = lambda said: pytest.fail(f"torchrun: {said}")
    found = parser.parse_args([word for word in words if word != "2>/dev/null"])
    if Path(found.training_script).name == SCRIPT:
        for word in found.training_script_args[::2]:
            assert f'"{word}"' in SCRIPT_TEXT, word
        return
    assert found.module
    package, _, name = found.training_script.rpartition(".")
    assert (package, name in ("profile", "run")) == ("timeprest.cli", True)
    parse(f"tp-{name}", found.training_script_args)


def check_script(words):
    """A module or a script of ours, with options that its text names, or that tp-run has."""
    if words[0] == "-m":
        assert find_spec(words[1]), f"there is no module {words[1]}"
        return
    text = (ROOT / words[0]).read_text()
    known = {name for p in run_main.params for name in (*p.opts, *p.secondary_opts)}
    for word in words[1:]:
        assert not word.startswith("--") or word in known or f'"{word}"' in text, word


def alternatives(words):
    """``--transport auto|gloo`` as two."""
    return itertools.product(*([w] if "=" in w else w.split("|") for w in words))


def check_options(words):
    """Options in running text: some command has them all, and takes the values."""
    said = []
    for program, command in PROGRAMS.items():
        group = isinstance(command, click.Group)
        others = [*([] if group else [None]), *commands_below(command)]
        for other in others:
            try:
                parse(program, [*([other] if other else []), *words], in_text=True)
            except click.ClickException as error:
                said.append(error)
            else:
                return
    told = [error for error in said if not isinstance(error, click.NoSuchOption)]
    raise (told or said)[0]


def test_every_option_is_named_on_some_page():
    """Or its opposite; those of all commands, such as --quiet, say themselves what they do."""
    text = "\n".join(page.read_text() for page in PAGES.values())
    named = set(re.findall(r"--[a-z][a-z-]*", text))
    every = [c for p in PROGRAMS.values() for c in (p, *commands_below(p).values())]
    options = [o for each in every for o in each.params if isinstance(o, click.Option)]
    names = {frozenset([*o.opts, *o.secondary_opts]) for o in options}
    common = {"--output", "--quiet", "--verbose", "--version"}
    assert [sorted(each) for each in names if not each & (named | common)] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_command_line_can_be_given(name):
    """In blocks, and in running text."""
    for block in blocks(PAGES[name]):
        for line in commands(block):
            try:
                check_command(words_of(line.text))
            except (AssertionError, click.ClickException) as error:
                told = getattr(error, "message", error)
                pytest.fail(f"{line.where}: {line.text}: {told}")
    for span in spans(PAGES[name]):
        first = span.text.split(" ")[0]
        whole = first in (*PROGRAMS, "make", "torchrun") and " " in span.text
        option = re.match(r"--[a-z]", first) and first not in OF_OTHERS
        if not whole and not option:
            continue
        try:
            for words in alternatives(words_of(span.text)):
                check_command(words, in_text=True) if whole else check_in_text(words)
        except (AssertionError, click.ClickException) as error:
            pytest.fail(f"{span.where}: `{span.text}`: {getattr(error, 'message', error)}")


def check_in_text(words):
    """Options alone; an option whose value is left out is one that exists."""
    if len(words) > 1:
        check_options(words)
        return
    assert words[0] in {*known_options(), "--help", "--version"}, "no command has this option"


@cache
def known_options():
    """Every name of an option of ours."""
    below = (c for program in PROGRAMS.values() for c in commands_below(program).values())
    commands = (*PROGRAMS.values(), *below, published)
    params = [p for command in commands for p in command.params]
    params += profile_main.of_importers(["--help"])
    return {name for p in params for name in (*p.opts, *p.secondary_opts)}


@pytest.mark.parametrize("name", PAGES)
def test_what_pages_point_at_is_there(name):
    """Files of ours, other pages and their headings, and names of the package."""
    page = PAGES[name]
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file) if file else page
        assert found.exists(), f"{name}: links to {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", found.read_text("utf-8"), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads]
            assert anchor in anchors, f"{name}: links to {target}"
    for span in spans(page):
        if re.fullmatch(rf"({'|'.join(FOLDERS)}|docs)/[\w/.-]+", span.text):
            found = ROOT / span.text
            assert found.exists() or (ROOT / f"{span.text}.py").exists(), (
                f"{span.where}: {span.text}"
            )
        if re.match(r"timeprest\.\w", span.text):
            check_name(span)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_names_of_the_code_are_in_it(name):
    """Files, functions, classes, fields and tables that pages about the code name alone."""
    files = [path for folder in (*FOLDERS, "docs") for path in (ROOT / folder).rglob("*.py")]
    known = {word for path in files for word in re.findall(r"\w+", path.read_text("utf-8"))}
    known |= {path.name for path in files} | {path.name for path in ROOT.glob("*.py")}
    for span in spans(PAGES[name]):
        if re.fullmatch(r"\w+(\.py|\(.*\))?", span.text):
            missing = set(re.findall(r"[A-Za-z_][\w.]*", span.text)) - known
            assert not missing, f"{span.where}: {span.text}: nothing is called {missing}"


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/plugins.md"])
def test_names_beside_a_file_are_defined_in_it(name):
    found = set(names_beside_files(PAGES[name]))
    assert found
    for path, defined in found:
        names = set(names_defined(ast.parse((ROOT / path).read_text("utf-8"))))
        assert defined in names, f"{name}: {path} has no {defined}"


def check_name(span):
    """``timeprest.plan(replicas=True)``: the name exists, and takes that."""
    tree = ast.parse(span.text.replace("…", "..."), mode="eval").body
    call = tree if isinstance(tree, ast.Call) else None
    found = named(ast.unparse(call.func if call else tree))
    if call is not None:
        parameters = inspect.signature(found).parameters
        for keyword in call.keywords:
            known = keyword.arg in parameters or "of_file" in parameters
            assert known, f"{span.where}: {span.text}: no {keyword.arg}"


def named(dotted):
    """An object by its name; modules are imported."""
    module, *rest = dotted.split(".")
    found = import_module(module)
    for part in rest:
        module = f"{module}.{part}"
        if not hasattr(found, part):
            import_module(module)
        found = getattr(found, part)
    return found


def test_no_snippet_stays_unseen():
    """Blocks that would be passed over fail."""
    page = ROOT / "README.md"
    for text, words in (
        ("```rust\nfn main() {}\n```", "mark it as one of"),
        ("```\nimport timeprest\n```", "mark it as python"),
        ("```\n[[devices]]\n```", "mark it as toml"),
        ("    tp-plan show plan.json", "between fences"),
        ("```\ntp-plan show plan.json\nanything else\n```", "what command is"),
        ("```\n$ ls plan.json\n```", "what command is"),
        ("```\ntp-plan show plan.json", "isn't closed"),
    ):
        with pytest.raises(AssertionError, match=words):
            [commands(block) for block in blocks(page, text)]
    for line in (
        "tp-plan solve profile.json --no-such-option",
        "tp-plan solve",
        "tp-plan solve profile.json --update-every many",
        "tp-plan sovle profile.json",
        "tp-run report",
        "torchrun --nodes 2 -m timeprest.cli.run plan.json",
        "torchrun -m timeprest.cli.run plan.json --epoch",
        "make demos",
        "sudo .venv/bin/python tests/helpers/processes/two_hosts.py plan.json --rates 1",
    ):
        with pytest.raises((AssertionError, click.ClickException, pytest.fail.Exception)):
            check_command(words_of(line))
    with pytest.raises(AssertionError, match="no micro_batch"):
        check_name(Text("here", "", "timeprest.plan(micro_batch=2)"))


# Running them --------------------------------------------------------------------------------


pytestmark = pytest.mark.usefixtures("plugins_forgotten")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with what pages take for granted: a task, its profile, plans, and runs."""
    folder = tmp_path_factory.mktemp("docs")
    (block,) = [b for b in blocks(PAGES["docs/tasks.md"]) if b.text.startswith("# mine.py\n")]
    (folder / "mine.py").write_text(block.text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        profile = timeprest.profile("mine.py:Task", batch_size=64, seconds=0)
        # One micro-batch has the largest version differences: the task's rate must do with them.
        plan = plan_by_hand(with_times(profile), "timeprest", 2, 1, [3, 1], mini_batch=64)
        (folder / "demo").mkdir()
        for name in ("profile.json", "demo/profile.json"):
            write_file(name, profile)
        for name in ("plan.json", "other.json", "demo/plan.json"):
            write_file(name, plan)
        ended = run(plan, RunSettings(task="mine.py:Task", epochs=5), "runs/first", inline=True)
        assert ended.epochs[-1].test["loss"] < 0.2, "the page's own task doesn't learn"
        for name in ("x", "y", "timeprest", "gpipe"):
            shutil.copytree("runs/first", f"runs/{name}")
        for line in EXPORTS:
            assert CliRunner().invoke(run_main, shlex.split(line)).exit_code == 0
    return folder


EXPORTS = ("export runs/first -o model.safetensors", "export runs/first --to dcp -o exported")


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A copy of it for one page, which is the folder at hand."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("mine", None)
    yield tmp_path
    # The next page has another one.
    sys.modules.pop("mine", None)


MOST_LINES = 200
"""Of a page."""

MOST_EPOCHS = 5
"""As many as the runs have that are there already."""


def cheaper(words, page):
    """The same command where it takes no more than a moment; None: it is read alone.

    Training is inline, for a few epochs; measuring takes few rounds. Every system's plan is
    searched on the page of systems.
    """
    program, *rest = words
    if "--to" in rest:
        # It writes no folder over.
        shutil.rmtree(value(rest, "-o"), ignore_errors=True)
    if program == "tp-plan":
        if "all" not in rest:
            return rest
        many = not cases.every and page != "docs/systems.md"
        # Where each has a search for each delay, or a study, two are enough.
        few = "gpipe,timeprest" if {"--front", "--study"} & {*rest} else "gpipe,pipedream,timeprest"
        shorter = [few if many and word == "all" else word for word in rest]
        return [*shorter, "--time-limit", "0.1"]
    if program == "tp-profile":
        own = rest and rest[0] == "mine.py:Task"
        return [*rest, "--seconds", "0"] if own and "--together" not in rest else None
    if program == "tp-run" and rest[0] == "study":
        return [*rest, *shlex.split("--steps 8 --tune 1 --seeds 2 --jobs 1")]
    if program != "tp-run" or {"report", "export", "--dry-run"} & set(rest):
        return rest if program == "tp-run" else None
    if "--check" in rest:
        # Others are checked against processes.
        flushes = VARIANTS[read_plan(rest[0]).variant].flushes
        return [*rest, *(["--inline"] if "--inline" not in rest else [])] if flushes else None
    if "--resume" in rest:
        # Of a run that was made with fewer, and of which nobody knows how it ended.
        Path(value(rest, "--run-dir"), "summary.json").unlink(missing_ok=True)
    elif value(rest, "--run-dir"):
        shutil.rmtree(value(rest, "--run-dir"), ignore_errors=True)
    most = MOST_EPOCHS + ("--resume" in rest)
    before = [None, *rest]
    fewer = [
        str(min(int(w), most)) if b == "--epochs" else w for b, w in zip(before, rest, strict=False)
    ]
    if "--config" in fewer and "--epochs" not in fewer:
        # The file has more, and the command line wins.
        fewer += ["--epochs", str(MOST_EPOCHS)]
    if "--run-dir" not in fewer:
        # Two runs of one second would have the same.
        fewer += ["--run-dir", f"runs/{len(list(Path('runs').iterdir()))}"]
    return fewer if "--inline" in fewer else [*fewer, "--inline"]


def value(words, option):
    """What follows an option; None where it isn't given."""
    return words[words.index(option) + 1] if option in words else None


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n, page in PAGES.items() if any(commands(b) for b in blocks(page))]
)
def test_commands_run(name, place):
    """Those that are cheap, one after another."""
    for block in blocks(PAGES[name]):
        if block.language == "toml" and block.text.startswith("# tp-run options"):
            Path("run.toml").write_text(block.text)
        write_example(block)
    for block in blocks(PAGES[name]):
        for line in commands(block):
            words = words_of(line.text)
            given = cheaper(words, name)
            if given is None or any(not Path(w).exists() for w in given if is_input(w)):
                continue
            done = CliRunner().invoke(PROGRAMS[words[0]], given)
            assert done.exit_code == 0, f"{line.where}: {line.text}: {done.output}"


def write_example(block):
    """What a page shows as a file that its commands take."""
    name = block.text.partition("\n")[0].partition(":")[0].removeprefix("# ")
    if name in ("cluster.toml", "order.txt", "my_pipemare.py"):
        Path(name).write_text(block.text)


def is_input(word):
    """Whether a word names a plan's or profile's file that no page makes here."""
    return word in ("plan.gpipe.json", "plan.timeprest.json") or "*" in word


@pytest.mark.parametrize(
    "name", [n for n, page in PAGES.items() if any(b.language == "python" for b in blocks(page))]
)
def test_python_runs(name, place, monkeypatch):
    """Snippets of a page, one after another. Runs are inline, and measuring takes few rounds."""
    real = {"profile": timeprest.profile, "run": timeprest.run}
    less = {"profile": {"seconds": 0}, "run": {"inline": True, "epochs": 1}}

    def instead(which):
        def function(*args, **given):
            inspect.signature(real[which]).bind(*args, **given)
            return real[which](*args, **{**given, **less[which]})

        return function

    for which in real:
        monkeypatch.setattr(timeprest, which, instead(which), raising=False)
    # Measuring starts processes, and is measured elsewhere.
    measure = inspect.signature(timeprest.links)
    monkeypatch.setattr(
        timeprest,
        "links",
        lambda *args, **given: measure.bind(*args, **given) and uniform_cluster(2),
        raising=False,
    )
    import mine

    if name == "README.md":
        # It makes this run itself, and of the task that it shows.
        shutil.rmtree("runs/first")
        (block,) = [b for b in blocks(PAGES[name]) if b.text.startswith("# mine.py\n")]
        Path("mine.py").write_text(block.text)
    known = {"model": mine.Task().model(), "__name__": "snippet"}
    for block in blocks(PAGES[name]):
        write_example(block)
        if block.language != "python":
            continue
        text = textwrap.dedent(block.text)
        code = compile("\n" * int(block.where.split(":")[1]) + text, name, "exec")
        hooks = [
            node
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef) and [a.arg for a in node.args.args][:1] == ["self"]
        ]
        if hooks:
            check_hooks(block, text, hooks)
        else:
            exec(code, known)


def test_every_public_name_has_an_example():
    """In Python that the test above runs."""
    names = ("python", "networkx", "callbacks", "plugins")
    found = [b for name in names for b in blocks(PAGES[f"docs/{name}.md"])]
    code = "\n".join(b.text for b in found if b.language == "python")
    used = {node.attr for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    assert set(timeprest.__all__) - {"__version__"} <= used
    methods = {name for name in vars(Callback) if name.startswith("on_")}
    page = PAGES["docs/callbacks.md"].read_text("utf-8")
    assert methods == set(re.findall(r"^\| `(on_\w+)`", page, re.M))


def check_hooks(block, text, hooks):
    """Methods for a task: those that the page's task can have are tried in a dry run, which calls
    each of them."""
    own = f"mine_{block.where.split(':')[1]}"
    Path(f"{own}.py").write_text(
        "import math\nimport torch\nfrom torch import nn\nimport mine\n\nclass Task(mine.Task):\n"
        + textwrap.indent(text, "    ")
    )
    if [hook.name for hook in hooks] == ["loss"]:
        # Of a language model, which the page's task has none of.
        labels = torch.tensor([[1, 2, -100], [0, -100, -100]])
        found = import_module(own).Task().loss({"logits": torch.randn(2, 3, 5)}, labels)
        assert read_loss(found).weight == 3, block.where
        return
    done = CliRunner().invoke(run_main, ["plan.json", "--task", f"{own}.py:Task", "--dry-run"])
    assert done.exit_code == 0, f"{block.where}: {done.output}"


@pytest.mark.parametrize(
    "name", [n for n, page in PAGES.items() if any(b.language == "toml" for b in blocks(page))]
)
def test_toml_files_are_read(name, tmp_path):
    """Clusters, device specs and options; a table that goes into a cluster's file goes there."""
    cluster = ""
    for k, block in enumerate(b for b in blocks(PAGES[name]) if b.language == "toml"):
        path = tmp_path / f"{k}.toml"
        if "module_fqns_per_model_part" in block.text:
            assert tomllib.loads(block.text)["parallelism"]["pipeline_parallel_degree"] == 2
            continue
        if "memory_bandwidth_bytes_per_s" in block.text:
            path.write_text(block.text)
            load_spec(str(path))
            continue
        if found := re.match("# (tp-[a-z]+) options", block.text):
            path.write_text(block.text)
            command = PROGRAMS[found[1]]
            assert read_config(click.Context(command, info_name=found[1]), str(path), ())
            continue
        cluster = block.text if "[[devices]]" in block.text else f"{cluster}\n{block.text}"
        path.write_text(cluster)
        read_cluster(str(path))


# Tables and lists ----------------------------------------------------------------------------


def table(name, *head):
    """The one table of a page whose head begins so."""
    (found,) = [t for t in tables(PAGES[name]) if t.head[: len(head)] == head]
    return found


@pytest.mark.parametrize("name", ["README.md", "docs/systems.md"])
def test_every_system_has_a_row(name):
    """And no other has one; docs/systems.md says what its backwards are of."""
    found = next(t for t in tables(PAGES[name]) if t.head[0] == "system")
    assert sorted(re.findall(r"^`([^`]+)`", "\n".join(row[0] for row in found.rows), re.M)) == (
        sorted(VARIANTS)
    )
    if "backward of" not in found.head:
        return
    for row in found.rows:
        variant = VARIANTS[row[0].strip("`")]
        of = {"mini": "the mini-batch", "micro": "a micro-batch"}[variant.backward_unit]
        assert row[found.head.index("backward of")] == of
        schedule = row[found.head.index("schedule")]
        if not schedule.startswith(("as ", "the same")):
            assert ("never flushed" in schedule) != variant.flushes, f"{name}: {row[0]}"
            assert ("N = 1" in schedule) == variant.whole_mini_batches, f"{name}: {row[0]}"


@pytest.mark.parametrize("name", PAGES)
def test_tables_list_what_there_is(name):
    """Tables of systems and of options name such as exist, with the values that they take."""
    commands_ = [c for p in PROGRAMS.values() for c in (p, *commands_below(p).values())]
    for found in tables(PAGES[name]):
        if found.head[0] == "system":
            names = {
                row[0].strip("*").split("`")[1] if "`" in row[0] else row[0] for row in found.rows
            }
            assert names <= set(VARIANTS), f"{found.where}: {names - set(VARIANTS)}"
        for row in found.rows if found.head[0] == "option" else ():
            option = row[0].strip("`").split(" ")[0]
            params = [p for c in commands_ for p in c.params if option in p.opts]
            assert params, f"{found.where}: {option}"
            choices = [set(p.type.choices) for p in params if isinstance(p.type, click.Choice)]
            told = set(re.findall(r"`([^`]+)`", row[1]))
            assert not choices or told in choices, f"{found.where}: {option} takes {choices}"


def test_lists_of_files_and_fields_are_whole():
    """Pages name every field of profiles, plans and logs, and what a run leaves."""
    page = PAGES["docs/files.md"]
    operations = table("docs/run_directory.md", "field")
    assert sorted(operations.names()) == sorted(f.name for f in msgspec.structs.fields(Line))
    left = {re.split(r"[/]", name)[0] for name in table("docs/run_directory.md", "file").names()}
    assert left == set(RUN_OWN)
    for heading, structs in (
        ("## Profile", (Profile, Layer, Measurement)),
        ("## Plan", (Plan, PlanStage, SolverReport)),
    ):
        text = section(page, heading)
        named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))
        for struct in structs:
            missing = {f.name for f in msgspec.structs.fields(struct)} - named
            assert not missing, f"docs/files.md, {heading}: {struct.__name__} has {missing}"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short(name):
    """One question of one reader; what is longer has two of them."""
    assert len(PAGES[name].read_text("utf-8").splitlines()) <= MOST_LINES, name


def test_lists_of_models_devices_and_columns_are_whole():
    """Built-in models, shipped device specs, and the columns that `tp-plan show` prints."""
    profiling = PAGES["docs/profiling.md"]
    models = next(
        t for t in tables(profiling) if t.head[:2] == ("target", "arguments and defaults")
    )
    tasks = table("docs/profiling.md", "target", "what").names()
    listed = {name for name in (*models.names(), *tasks) if name.isidentifier() or "-" in name}
    built_in = set(plugins.names("tasks"))
    assert built_in <= listed | {"hf"}, built_in - listed
    assert {name for name in models.names() if ":" not in name} <= built_in
    shipped = re.search(r"Specs shipped: (.*?)\. ", profiling.read_text("utf-8"), re.S)
    assert set(re.findall(r"`([^`]+)`", shipped[1])) == set(read_toml(SHIPPED_DEVICES, ""))
    columns = [
        c.strip()
        for row in table("docs/reading_tables.md", "column").rows
        for c in row[0].split(",")
    ]
    drawn = Console(width=200, record=True, file=io.StringIO())
    drawn.print(stage_table(chain_plan("timeprest"), 200))
    head = next(line for line in drawn.export_text().splitlines() if line.startswith("stage "))
    assert re.split(r"\s{2,}", head.strip()) == columns
