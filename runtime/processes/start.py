"""Starting the workers' processes: forked from one that has loaded torch, where that is possible.

Loading torch takes a core one to three seconds, and often more workers start than there are cores.
So on Linux a fork server is started first (`main`): it loads the workers' module once and is forked
for each of them; so it does with libraries that the task needs and that take as long. What is known
to be needed it loads while its launcher gets ready (`load_ahead`). It never
computes, so nothing of torch has begun that a fork would break. It stays
for the next run of the same thread with the same environment, and ends with its launcher, when it
hasn't been asked for a while, or when there are runs in two others. Elsewhere each worker is a
process of its own from the beginning.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from ...profiles import plugins
from ...profiles.errors import RunError
from ...profiles.measuring.process_settings import end_with_parent

WORKER = f"{__package__.rpartition('.')[0]}.training.worker"
"""The module that a worker's process of a run is."""

IDLE_S = 300.0
"""A fork server that nobody asks, and that has no workers, ends."""

LOADING_S = 300.0
"""Longest wait for a fork server to load torch."""

_MOST_KEPT = 2
"""Fork servers of a thread: where one run has another environment, that of the others stays."""

_MESSAGE_BYTES = 1 << 16
_AT_ONCE = 200
_LOOK_S = 0.02
_ENDING_S = 1.0
_KILLED = -signal.SIGKILL


def start_process(
    module: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    out: IO[bytes],
    err: IO[bytes],
    libraries: Sequence[str] = (),
) -> WorkerProcess:
    """Start ``python -m module``, whose last argument is the number of the process that starts it.
    Its `main(arguments)` ends the process. Raises OSError where there can't be another one.

    Args:
        variables: of the environment, besides those of this process.
        libraries: modules that it will need, as `slow_libraries` names them.
    """
    server = _server_of_this_thread(module, lambda: err)
    if server is not None:
        with contextlib.suppress(ConnectionError):
            return server.fork(module, arguments, variables, out, err, libraries)
    return _Spawned(module, arguments, variables, out, err)


def end_processes(processes: Sequence[WorkerProcess], grace_s: float) -> None:
    """Ask all to end, and what they have started; make them where they haven't within so long."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + grace_s
        for process in processes:
            process.end(how)
        for process in processes:
            process.wait(max(0.0, end - time.monotonic()))
    for process in processes:
        process.forget()


def load_ahead(module: str, libraries: Sequence[str] = ()) -> None:
    """Have what this thread's workers will need loaded, while this process does something else.

    What can't be loaded is said in the log of the worker that needs it.
    """
    with contextlib.suppress(OSError):
        server = _server_of_this_thread(module, tempfile.TemporaryFile)
        if server is not None:
            server.load(libraries)


_SLOW = ("datasets", "sklearn", "torchvision", "transformers")
"""Libraries that take a second or more to load, and start nothing when they are."""

_OPTIMIZERS_LOAD = "torch._dynamo"


def slow_libraries() -> list[str]:
    """Modules of such libraries that this process has loaded, and its workers will; and what every
    optimizer of torch loads when it is made."""
    found = [
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _SLOW
        # What has the same name in the user's folder is the user's.
        and {"site-packages", "dist-packages"}
        & {*Path(getattr(module, "__file__", None) or "").parts}
    ]
    # Loading a module loads the packages around it.
    packages = {name.rpartition(".")[0] for name in found}
    return [_OPTIMIZERS_LOAD, *(name for name in found if name not in packages)]


class _Spawned:
    """A worker's process, in a session of its own from the beginning."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        out: IO[bytes],
        err: IO[bytes],
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **variables},
            # Ctrl-C in the terminal is for the launcher.
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs. Raises RunError where it can't
        be started."""
        return self.process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end. Returns its exit code; None where it runs on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def end(self, how: int) -> None:
        """Send a signal to it and to what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, how)

    def forget(self) -> None:
        """Its number may be another's from now on; of a child, once it has been waited for."""


# The launcher's side -------------------------------------------------------------------------


class _Forked:
    """The same (`_Spawned`) of a process that the server has forked, or is about to."""

    def __init__(self, server: _Server, log: str) -> None:
        self.server = server
        self.log = log
        self.pid: int | None = None
        self.code: int | None = None
        self.asked = time.monotonic()

    def poll(self) -> int | None:
        self.server.read()
        if self.code is None and self.server.ended:
            # A worker goes with the process that forked it; what that couldn't load, nobody can.
            self.code = _KILLED if self.pid is not None else self.server.process.returncode or 1
            if self.pid is None:
                self.server.explain(self.log)
        if self.pid is None and self.code is None and time.monotonic() > self.asked + LOADING_S:
            self.server.close()
            raise RunError(f"loading torch took longer than {LOADING_S:g} s: no worker was started")
        return self.code

    def wait(self, timeout_s: float) -> int | None:
        end = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return self.code

    def end(self, how: int) -> None:
        if self.pid is None:
            # It isn't there yet, and mustn't be any more.
            self.server.close()
        elif not self.server.ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, how)

    def forget(self) -> None:
        if self.pid is not None and self.code is not None:
            self.server.send({"forget": self.pid})


WorkerProcess = _Spawned | _Forked


class _Server:
    """A fork server, as its launcher sees it."""

    def __init__(self, module: str, err: IO[bytes]) -> None:
        self.environment = dict(os.environ)
        self.ended = False
        self._err = err
        self._gone = False
        self._asked: deque[_Forked] = deque()
        self._forked: dict[int, _Forked] = {}
        self._libraries: set[str] = set()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen(
                # Room for the command lines of the workers, which take the place of this one.
                [
                    *(sys.executable, "-m", __name__, f"--load={module}"),
                    *(str(fd), str(os.getpid()), " " * 500),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                pass_fds=(fd,),
                start_new_session=True,
            )
        self._socket.setblocking(False)

    def fits(self) -> bool:
        """Whether what it forks is as a process that is started now. What libraries read of the
        environment, they read when they are loaded."""
        self.read()
        return not self.ended and self.environment == dict(os.environ)

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        out: IO[bytes],
        err: IO[bytes],
        libraries: Sequence[str],
    ) -> _Forked:
        """Have a worker forked. Raises ConnectionError where the server has ended."""
        self.load(libraries)
        asked = {
            "module": module,
            "arguments": list(arguments),
            "variables": dict(variables),
            "folder": os.getcwd(),
        }
        text = json.dumps(asked).encode()
        try:
            socket.send_fds(self._socket, [text], [out.fileno(), err.fileno()])
        except OSError as error:
            self.close()
            raise ConnectionError from error
        self._asked.append(_Forked(self, err.name))
        return self._asked[-1]

    def load(self, libraries: Sequence[str]) -> None:
        new = [name for name in libraries if name not in self._libraries]
        self._libraries.update(new)
        for begin in range(0, len(new), _AT_ONCE):
            # Where it doesn't take them at once, its workers load them themselves.
            self.send({"load": new[begin : begin + _AT_ONCE]})

    def send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(message).encode())

    def read(self) -> None:
        while not self.ended:
            try:
                text = self._socket.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                # One that somebody has stopped tells of no worker's end: nobody's wait would end.
                self.process.send_signal(signal.SIGCONT)
                return
            except OSError:
                text = b""
            if not text:
                self._gone = True
                self.close()
                return
            said = json.loads(text)
            if "code" in said:
                self._forked.pop(said["pid"]).code = said["code"]
            else:
                forked = self._asked.popleft()
                forked.pid = said["pid"]
                self._forked[said["pid"]] = forked

    def explain(self, log: str) -> None:
        """Write what it said when it ended, before there were logs, to that of a worker."""
        if not self._err.closed:
            with contextlib.suppress(OSError), self._err as said, Path(log).open("ab") as file:
                said.seek(0)
                file.write(said.read())

    def close(self) -> None:
        """End it, with all that it has forked. One that ends by itself has a moment to do it."""
        self.ended = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_ENDING_S if self._gone else 0)
        self.process.kill()
        self.process.wait()
        self._socket.close()


_servers = threading.local()
"""Each thread has its own: when the thread ends that has started a process, the system tells that
process that its parent is gone."""


def _server_of_this_thread(module: str, err: Callable[[], IO[bytes]]) -> _Server | None:
    """The fork server for workers that are started here; None where there can't be one. `err`:
    where one that is started now says why it can't load the module."""
    if sys.platform != "linux":
        return None
    kept: list[_Server] = getattr(_servers, "kept", [])
    server = next((one for one in kept if one.fits()), None) or _Server(module, err())
    others = [one for one in kept if one is not server and not one.ended]
    _servers.kept = [server, *others[: _MOST_KEPT - 1]]
    for one in others[_MOST_KEPT - 1 :]:
        one.close()
    return server


@atexit.register
def _close_servers() -> None:
    for server in getattr(_servers, "kept", []):
        if not server.ended:
            server.close()
    _servers.kept = []


# The server's side ---------------------------------------------------------------------------


def main(arguments: list[str]) -> NoReturn:
    """Load a module, and fork for whoever asks, until the launcher is gone."""
    load, fd, launcher, *_ = arguments
    end_with_parent(int(launcher), look=False)
    module = load.partition("=")[2]
    asking = socket.socket(fileno=int(fd))
    # What it loads is no garbage, and its workers share the memory as long as nothing is looked
    # through; they collect their own.
    gc.disable()
    importlib.import_module(module)
    # Each of its workers would look through all installed packages.
    with contextlib.suppress(Exception):
        plugins.packages()
    _serve(asking)
    os._exit(0)


def _serve(asking: socket.socket) -> None:
    selector = selectors.DefaultSelector()
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector.register(asking, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    running: set[int] = set()
    leaving = False
    while True:
        ready = selector.select(IDLE_S)
        if not ready and not running:
            # Who asks from now on is told that nobody is there; who has asked is still heard.
            leaving = True
            asking.shutdown(socket.SHUT_RD)
            ready = [(selector.get_key(asking), selectors.EVENT_READ)]
        for key, _ in ready:
            if key.fileobj is wake:
                wake.recv(_MESSAGE_BYTES)
                continue
            text, fds, _, _ = socket.recv_fds(asking, _MESSAGE_BYTES, 2)
            if not text:
                if not (leaving and running):
                    return
                selector.unregister(asking)
                continue
            said = json.loads(text)
            if "load" in said:
                for name in said["load"]:
                    # Whatever is wrong with it, the worker that needs it will say.
                    with contextlib.suppress(Exception):
                        importlib.import_module(name)
                continue
            if "forget" in said:
                os.waitpid(said["forget"], 0)
                continue
            server = os.getpid()
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for open_here in (selector, wake, woken, asking):
                    open_here.close()
                _work(said, fds, server)
            for number in fds:
                os.close(number)
            running.add(pid)
            asking.send(json.dumps({"pid": pid}).encode())
        for pid in sorted(running):
            # It stays a zombie until the launcher needs its number no more.
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                running.remove(pid)
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                asking.send(json.dumps({"pid": pid, "code": code}).encode())


def _work(asked: Mapping[str, Any], fds: Sequence[int], server: int) -> NoReturn:
    gc.freeze()
    gc.enable()
    end_with_parent(server, look=False)
    os.setsid()
    for number, target in zip(fds, (1, 2), strict=True):
        os.dup2(number, target)
        os.close(number)
    before, folder = os.getcwd(), asked["folder"]
    os.chdir(folder)
    if sys.path[:1] == [before]:
        sys.path[0] = folder
    os.environ.update(asked["variables"])
    module = importlib.import_module(asked["module"])
    arguments = [*asked["arguments"], str(server)]
    sys.argv = [str(module.__file__), *arguments]
    _call_this_process([sys.executable, "-m", asked["module"], *arguments])
    # Like a process of its own: random numbers that nobody has seeded are others each time.
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    module.main(arguments)
    os._exit(0)


_ARGUMENTS_BEGIN = 47
"""Index of arg_start in /proc/PID/stat (proc_pid_stat(5) counts from 1); then comes arg_end."""


def _call_this_process(command: Sequence[str]) -> None:
    """Have `ps` show a command as this process's, cut off where there isn't room for it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The program's name, in brackets, may have blanks.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        begin, end = (int(fields[at - 2]) for at in (_ARGUMENTS_BEGIN, _ARGUMENTS_BEGIN + 1))
        text = b"".join(os.fsencode(part) + b"\0" for part in command)[: end - begin - 1]
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main(sys.argv[1:])
