"""What a process of ours is set to: it ends with its parent, keeps freed memory, and looks for no
garbage while it loads; and how a program of the user's gets its own settings back."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_PR_SET_PDEATHSIG = 1

LOOK_S = 1.0
"""Between two looks at the parent, where the system doesn't tell of its end."""


def end_with_parent(parent: int, look: bool = True) -> None:
    """Have this process killed when its parent is gone, however that ended.

    On Linux the kernel does it, whatever this process is doing: it may be stopped, out of
    memory, or inside a call that lets no other thread run. Elsewhere a thread looks, or nobody.

    Args:
        parent: its process number, as the parent itself said, or as read when this one began.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have gone before that.
    _end_without(parent)
    if look:
        threading.Thread(target=_look, args=(parent,), daemon=True).start()


def _look(parent: int) -> None:
    while True:
        time.sleep(LOOK_S)
        _end_without(parent)


def _end_without(parent: int) -> None:
    # A process whose parent has gone is given another one.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


_TURN = threading.RLock()


def one_at_a_time(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Of several threads that call these functions one goes on: tracing, measuring and training
    set torch's random numbers, hooks and modes, which a process has once."""

    @functools.wraps(function)
    def in_turn(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _TURN:
            return function(*args, **kwargs)

    return in_turn


# Keeping freed memory for the next step, as PyTorch's allocator does on a GPU -------------------
# glibc maps every allocation over 32 MiB anew and hands freed memory back to the system, so each
# training step pays for page faults again: a third of a backward of a network with 500 MB of
# gradients, and more for a whole model than for its layers one by one.

# Numbers of mallopt's parameters (malloc.h); a trim threshold of -1 stands for never.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_KEPT = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 64 * 2**20))
# What glibc begins with, and the thresholds that it has once 32 MiB were freed at a time: set by
# hand, they don't grow by themselves any more.
_GIVEN_BACK = (
    (_MMAP_MAX, 65536),
    (_MMAP_THRESHOLD, 32 * 2**20),
    (_TRIM_THRESHOLD, 64 * 2**20),
    (_TOP_PAD, 128 * 2**10),
)
_kept_for_good = False


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed, for this whole process; on Linux with glibc alone.

    For processes of our own, the commands and the stages: it is theirs to decide, not a library's
    that is called from another program. Returns whether that was possible.
    """
    global _kept_for_good
    _kept_for_good = _set(_KEPT)
    return _kept_for_good


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Have it kept while the context lasts, in a program that isn't ours; then given back."""
    kept = not _kept_for_good and _set(_KEPT)
    try:
        yield
    finally:
        if kept:
            _set(_GIVEN_BACK)
            ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def folder_kept() -> Iterator[None]:
    """For what is to be written afterwards: the user's code may go to another folder."""
    folder = os.getcwd()
    try:
        yield
    finally:
        os.chdir(folder)


_USE = threading.Lock()
_users: set[int] = set()
_put_back = contextlib.ExitStack()


@contextlib.contextmanager
def settings_put_back() -> Iterator[None]:
    """For a program that isn't ours: whatever measuring or training sets is set back when the
    context ends; of several threads when the last one's does, as others train by it until then.

    That is: freed memory is kept, torch has other threads and deterministic operations, random
    generators are seeded.
    """
    thread = threading.get_ident()
    if thread in _users:
        # In a callback: the run around it goes on with what it had set.
        with _TURN, _settings_kept():
            yield
        return
    with _USE:
        if not _users:
            _put_back.enter_context(_settings_kept())
        _users.add(thread)
    try:
        yield
    finally:
        with _USE:
            _users.remove(thread)
            if not _users:
                _put_back.close()


@contextlib.contextmanager
def _settings_kept() -> Iterator[None]:
    import torch

    from ..tracing.random_states import set_states, states

    threads, drawn = torch.get_num_threads(), states()
    deterministic = _deterministic()
    on_gpus = torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if on_gpus else ()
    try:
        with freed_memory_kept(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        set_states(drawn)
        if not on_gpus:
            # What GPUs will draw by once they are used: torch.manual_seed seeds them with the rest.
            torch.cuda.manual_seed_all(torch.initial_seed())
        torch.set_num_threads(threads)
        if _deterministic() != deterministic:
            # It loads torch's compiler, for seconds: not where nothing has changed it.
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


def _deterministic() -> tuple[bool, bool]:
    """Whether operations are to be deterministic, and whether those that can't only warn."""
    import torch

    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warn_only


def _set(settings: tuple[tuple[int, int], ...]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    done = [mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(done)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Nobody looks for garbage meanwhile. Modules leave none when they are loaded, and to look for
    it takes a fifth of torch's time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
