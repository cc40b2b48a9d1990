"""The secret of a run's workers: where each finds it.

Our own launcher makes one for each run, and gives it to the workers by an environment variable.
torchrun and srun know none: there the user gives it, in that variable or in a file; on one host
without it, the workers take one that this user's processes share.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from ...profiles.errors import FileError, UserError
from ...profiles.files import read_limited
from ..communication.signed_store import Secret
from .environment import Launched

SECRET_VARIABLE = "TIMEPREST_SECRET"
FILE_VARIABLE = "TIMEPREST_SECRET_FILE"
"""The environment variable with a file that has the secret."""

OPEN_TO_ALL = (
    f"no {SECRET_VARIABLE} is given: whoever reaches the store of rank 0 can join the run "
    "(docs/machines.md)"
)

_SHORTEST = 16
_MOST_BYTES = 1 << 16


def new_secret() -> str:
    """A secret as the environment variable has it."""
    return secrets.token_hex(32)


def take_secret(launched: Launched, environment: MutableMapping[str, str]) -> Secret | None:
    """The secret of this worker's run; out of the environment, which the user's code and whatever
    it starts may read.

    Returns:
        None where nobody has given one to the workers of several hosts.

    Raises UserError and FileError.
    """
    text, file = environment.pop(SECRET_VARIABLE, ""), environment.get(FILE_VARIABLE, "")
    if text:
        key = _checked(text.encode(), SECRET_VARIABLE)
    elif file:
        path = Path(file)
        key = _checked(read_limited(path, FILE_VARIABLE, most=_MOST_BYTES).strip(), file)
        if path.stat().st_mode & 0o077:
            raise UserError(f"{file}: others may read this secret: chmod 600 {file}")
    elif launched.one_host:
        key = _of_this_user()
    else:
        return None
    # What was signed before the workers were started anew doesn't go for them.
    return Secret(key).derived(f"attempt {launched.attempt}")


def _checked(key: bytes, where: str) -> bytes:
    if len(key) < _SHORTEST:
        raise UserError(
            f"{where}: a secret of fewer than {_SHORTEST} characters can be guessed: take that of "
            "openssl rand -hex 32"
        )
    return key


def _of_this_user() -> bytes:
    """A secret in a file of this user's alone, made by the first worker that asks."""
    folder = Path(tempfile.gettempdir()) / f"timeprest-{os.getuid()}"
    file = folder / "secret"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UserError(
                f"{folder}: isn't a folder of yours alone (mode 700), for the secret that the "
                f"workers share: remove it, or give a secret in {SECRET_VARIABLE}"
            )
        if not file.exists():
            handle, temporary = tempfile.mkstemp(dir=folder)
            with os.fdopen(handle, "w") as made:
                made.write(new_secret())
            # Of several at once, the first makes it.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, file)
            os.unlink(temporary)
        return _checked(file.read_bytes(), str(file))
    except OSError as error:
        raise FileError(
            f"{file}: the secret that the workers share can't be kept there: {error.strerror}; "
            f"give one in {SECRET_VARIABLE}"
        ) from None
