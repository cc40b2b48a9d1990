"""Error messages as one line on stderr with an exit code, and consoles for results."""

from __future__ import annotations

import atexit
import functools
import gc
import io
import json
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeVar

import click
import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ..profiles.errors import PlanError, TaskWarning, TimeprestError

F = TypeVar("F", bound=Callable[..., Any])

_PLAIN_WIDTH = 100
_MODULES = {f"{name}.py": f"tp-{name}" for name in ("profile", "plan", "run")}
_LONGEST_LINE = 1000
"""Characters of an error; names in a broken file can be any length."""
_AGAIN_S = 0.02
CONFIG_FILE = "timeprest.config"
"""Of a context's `meta`: the file of --config."""


def printable(name: str) -> str:
    """The name; what would move the cursor or can't be encoded is shown by its code."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


class PlainConsole(Console):
    """Prints text as it is: no markup, and nothing in it moves the cursor (`printable`).

    A string is one line, whatever name is in it; of texts that we put together, lines stay lines.
    """

    def __init__(self, **more: Any) -> None:
        # Names such as "net.py:Llama:" aren't emoji, and those with brackets aren't styles.
        super().__init__(highlight=False, soft_wrap=False, emoji=False, markup=False, **more)

    def on_broken_pipe(self) -> None:
        """An error as any other; rich ends the program."""
        raise

    def render_str(self, text: str, **more: Any) -> Text:
        return super().render_str(printable(text), **more)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.isprintable() or text == "\n":
                yield segment
            else:
                yield Segment("\n".join(map(printable, text.split("\n"))), segment.style)


def output() -> Console:
    """The console for results: stdout, as wide as the terminal or COLUMNS says, or 100 columns."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return PlainConsole(width=None if known else _PLAIN_WIDTH)


class Stopped(KeyboardInterrupt):
    """Ctrl-C; its text says how to go on."""


def _config_of(text: str) -> str:
    """The file of --config and a colon, where an error is about what stands there; else nothing."""
    context = click.get_current_context(silent=True)
    path = None if context is None else context.meta.get(CONFIG_FILE)
    if context is None or path is None or text.startswith(str(path)):
        return ""
    first, options = text.split(" ")[0].rstrip(":"), {o.name: o for o in context.command.params}
    for name, value in (context.default_map or {}).items():
        source = context.get_parameter_source(name)
        about = first in options[name].opts or repr(value) in text
        if about and source is click.core.ParameterSource.DEFAULT_MAP:
            return f"{path}: "
    return ""


def errors_as_lines(function: F) -> F:
    """Turn our errors into one line on stderr and their exit code, our warnings into one line
    each; Ctrl-C into code 130."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            with _warnings_as_lines(), _ctrl_c_heard():
                return function(*args, **kwargs)
        except TimeprestError as error:
            with suppress(OSError):
                complain(f"{_config_of(str(error))}{error}")
            sys.exit(error.exit_code)
        except KeyboardInterrupt as stop:
            more = f"; {stop}" if isinstance(stop, Stopped) and str(stop) else ""
            with suppress(OSError):
                log(f"stopped{more}")
            sys.exit(130)
        except BrokenPipeError as error:
            if why_unprinted(error) is None:
                raise
            # The reader of our output (head, less) has had enough.
            _give_up(sys.stdout)
            sys.exit(0)
        except Exception as error:
            from ..profiles.tasks.hooks import describe_error, ended_in_users_code
            from ..runtime.processes.failures import limit_reached

            words = "no memory is left" if isinstance(error, MemoryError) else str(error)
            limit = limit_reached(words)
            if not limit:
                if not ended_in_users_code(error):
                    raise
                # A plugin's, where nothing of it was expected to fail.
                complain(describe_error(error))
                sys.exit(2)
            with suppress(OSError):
                complain(f"{' '.join(words.split())[:200]}{limit}")
            sys.exit(1)
        except BaseException as error:
            # sys.exit() in the user's model would end the command without a word.
            from ..profiles.tasks.hooks import describe_error, from_users_code

            if not from_users_code(error):
                raise
            complain(describe_error(error))
            sys.exit(1)

    return wrapped  # type: ignore[return-value]


@contextmanager
def _ctrl_c_heard() -> Iterator[None]:
    """Where nothing can be raised, in finalizers and callbacks of weak references, Python reports
    and forgets Ctrl-C; while a model is traced or measured there are many. It comes again then."""
    before = sys.unraisablehook

    def hook(what: sys.UnraisableHookArgs) -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            before(what)
            return
        timer = threading.Timer(_AGAIN_S, os.kill, [os.getpid(), signal.SIGINT])
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def why_unprinted(error: BaseException) -> str | None:
    """Why something can't be printed: a full disk, a reader that has gone; None: another error."""
    if not isinstance(error, OSError) or error.filename is not None:
        return None
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    # Whatever else we write is named in its errors.
    printing = os.path.basename(os.path.dirname(last)) in ("click", "rich", "cli")
    return f"what it prints can't be written: {error.strerror}" if printing else None


@contextmanager
def _printed() -> Iterator[None]:
    """Flush what is printed in this block; exit where it can't be written."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        why = why_unprinted(error)
        if why is None:
            raise
        _give_up(sys.stdout)
        # The reader of our output (head, less) may have had enough.
        if not isinstance(error, BrokenPipeError):
            with suppress(OSError):
                complain(why)
        sys.exit(0 if isinstance(error, BrokenPipeError) else 1)
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            _give_up(sys.stderr)


def _open_closed() -> None:
    """Have whatever is read and written go nowhere where the caller has closed stdin, stdout or
    stderr, in whose place the next file that is opened would stand."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _give_up(stream: TextIO) -> None:
    """Discard what a stream still holds, so that the interpreter ends without an error."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("always", TaskWarning)
        others, shown = warnings.showwarning, set[str]()

        def show(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any
        ) -> None:
            if issubclass(category, TaskWarning):
                complain(f"warning: {message}")
            elif issubclass(category, UserWarning):
                # Torch's, of each number of samples that a model is tried with.
                text = f"{filename}:{lineno}: {message}"
                words = re.sub(r"\d+", "", text)
                if words not in shown:
                    complain(f"warning: {text}")
                shown.add(words)
            else:
                others(message, category, filename, lineno, *more)

        warnings.showwarning = show  # type: ignore[assignment]
        yield


def complain(message: str) -> None:
    """Print one line on stderr, whatever the message has in it from files and command lines."""
    line = printable(" ".join(message.split()))
    if len(line) > _LONGEST_LINE:
        line = f"{line[: _LONGEST_LINE // 2]} … {line[-_LONGEST_LINE // 3 :]}"
    log(line)


def log(message: str) -> None:
    """Print a line on stderr: a warning, or what is being done."""
    click.echo(f"{program()}: {printable(message)}", err=True)


def print_json(value: Any) -> None:
    """Print a result as JSON; names in it are escaped where they could move the cursor."""
    text = msgspec.json.encode(value).decode()
    if not text.isprintable():
        # The others are escaped in any case.
        text = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
    click.echo(text)


@contextmanager
def naming(plan_path: str) -> Iterator[None]:
    """Errors about a plan name its file."""
    try:
        yield
    except PlanError as error:
        said = str(error)
        if not said.startswith("plan: "):
            raise
        raise PlanError(f"{plan_path}{said.removeprefix('plan')}") from error


def _leave_garbage() -> None:
    """What torch has loaded is no garbage: to look for some at the end takes seconds. What triton
    has loaded reports as leaks, in many lines, what nobody looked for."""
    if not any(name.startswith("triton._C") for name in sys.modules):
        gc.freeze()


class OneLineCommand(click.Command):
    """A command whose usage errors are one line too."""

    def main(self, *arguments: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """As click's, which prints the usage and a hint besides."""
        _open_closed()
        if os.environ.get("COLUMNS") == "0":
            # Said by shells without a terminal; nothing at all would be printed.
            del os.environ["COLUMNS"]
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A file's name, or a layer's, may not be text in the terminal's encoding.
            sys.stdout.reconfigure(errors="backslashreplace")
        atexit.register(_leave_garbage)
        try:
            with _printed():
                code = super().main(*arguments, standalone_mode=False, **extra)  # type: ignore[call-overload]
            if not standalone_mode:
                return code
        except (click.ClickException, click.Abort) as error:
            if not standalone_mode:
                raise
            with _printed():
                sys.exit(_ended_by(error))
        sys.exit(code if isinstance(code, int) else 0)


def _ended_by(error: click.ClickException | click.Abort) -> int:
    """Print what ended the command. Returns its exit code."""
    if isinstance(error, click.Abort):
        complain("stopped")
        return 130
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return error.exit_code
    context = getattr(error, "ctx", None)
    see = f" (see {context.command_path} --help)" if context is not None else ""
    complain(error.format_message() + see)
    return error.exit_code


def program() -> str:
    """The command's name, for messages; also where it was started as a module of ours. Elsewhere,
    as in a notebook's kernel, the package's."""
    name = os.path.basename(sys.argv[0])
    return _MODULES.get(name, name if name.startswith("tp-") else "timeprest")
