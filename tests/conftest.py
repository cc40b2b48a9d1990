"""Fixtures that many tests share. Tests import the package by its installed name alone."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.drawn import cases
from hypothesis import settings

# One thread per process: the tests run side by side on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch.compile would build a program to see what the processor can do: half of all its time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Processes that tests start needn't compile the package anew, each by itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Started in the background of a script, Ctrl-C is ignored, and so it would be in what tests stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tables as wide as in a pipe, whatever the terminal says from which the tests run.
os.environ.pop("COLUMNS", None)

HERE = Path(__file__).parent

# Modules of tests and what they load are no garbage, which takes a quarter of the time to look for.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """What starts workers keeps a process with torch for as long as the environment is the same;
    pytest would change it with each test."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    """As before fixtures are made."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)


@pytest.fixture(scope="session", autouse=True)
def kernels(tmp_path_factory) -> None:
    """What is compiled is found again by later tests, and isn't kept beyond them.

    For all of them: torch sets it where nobody has, and the environment is another then.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.getbasetemp() / "kernels")


def pytest_addoption(parser) -> None:
    """Of tests with many cases."""
    parser.addoption(
        "--every-case", action="store_true", help="also what `choice` and `examples` leave out"
    )


def pytest_configure(config) -> None:
    """All cases run where they are wanted, or some tests are asked for by name; and more
    examples are drawn."""
    named = any("::" in argument for argument in config.args)
    cases.every = config.getoption("every_case") or named
    # The same examples everywhere: a change fails for what it changed, not by luck.
    drawn = cases.examples(150)
    settings.register_profile("house", deadline=None, max_examples=drawn, derandomize=True)
    settings.load_profile("house")


def pytest_collection_modifyitems(config, items) -> None:
    """Leave out what `choice` does."""
    if cases.every:
        return
    out = set(cases.left_out(items))
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]


@pytest.fixture(scope="session", autouse=True)
def no_notes_of_seeds() -> None:
    """For cards that aren't there, torch would note with each seed from where it came: 6 ms."""
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_available():
        return
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        kind.traceback = SimpleNamespace(format_stack=list)


@pytest.hookimpl
def pytest_collection_finish() -> None:
    """What the tests loaded stays: garbage is looked for among what they make, and not as often as
    where each object may be the last that memory has room for."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="session")
def mlp_target() -> str:
    """The float64 task that the oracle knows: four linear layers with tanh between them."""
    return f"{HERE / 'tasks/mlp_task.py'}:MLPTask"


@pytest.fixture(scope="session")
def mlp_profile(mlp_target: str):
    """Its profile; times are set by the tests that need them fixed."""
    from timeprest.profiles.measuring.measure import measure
    from timeprest.profiles.target import resolve

    return measure(resolve(mlp_target), batch_size=8, micro_batch_sizes=[2, 4, 8], seconds=0)


@pytest.fixture
def plugins_forgotten(monkeypatch):
    """No plugin stays behind, nor a system of one."""
    from timeprest.planner.systems import variants
    from timeprest.profiles import plugins

    tables = (variants.VARIANTS, variants._LOADED, plugins._FILES)
    before = [dict(table) for table in tables]
    monkeypatch.setenv(plugins.VARIABLE, "")
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)
