"""A store whose entries are signed with the secret that the workers of a run share, and sockets
whose callers sign.

torch's store answers whoever reaches its port: other users of the host, and of the network between
hosts. What such a one writes there has no signature, and is refused where it is read; gloo and
NCCL, whose workers tell each other their addresses there, take it neither. Entries can be read by
all, and counters (`add`) have no signature: who reaches the port may end a run, and no more.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ...profiles.errors import RunError

_SIGNATURE_BYTES = 32

_CALL = struct.Struct(f"<I{_SIGNATURE_BYTES}s")
"""Who calls over a socket, and its signature for that."""

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket (unix(7))."""


class ForeignEntryError(RunError):
    """Somebody else has written into the store."""


class Secret:
    """What the workers of a run know and nobody else does."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def derived(self, purpose: str) -> Secret:
        """Another one that follows from it, of which this one can't be found out."""
        return Secret(self.signature("derived", purpose.encode()))

    def signature(self, what: str, content: bytes = b"") -> bytes:
        """Of 32 bytes. `what`: what the content is; a signature goes for nothing else."""
        return hmac.digest(self._key, b"%d %b %b" % (len(what), what.encode(), content), "sha256")

    def has_signed(self, signature: bytes, what: str, content: bytes = b"") -> bool:
        """Whether a signature is ours."""
        return hmac.compare_digest(signature, self.signature(what, content))

    def call(self, connection: socket.socket, source: int, target: int) -> None:
        """Say over a Unix socket which rank calls. Raises OSError, where another user's process
        answers too."""
        if not _is_ours(connection):
            raise ConnectionError(f"another user's process answers for rank {target}")
        connection.sendall(_CALL.pack(source, self.signature(_from_to(source, target))))

    def caller(self, connection: socket.socket, target: int) -> int | None:
        """Which rank calls; None: no worker of the run."""
        with contextlib.suppress(TimeoutError):
            text = connection.recv(_CALL.size, socket.MSG_WAITALL)
            if len(text) == _CALL.size and _is_ours(connection):
                source, signature = _CALL.unpack(text)
                if self.has_signed(signature, _from_to(source, target)):
                    return int(source)
        return None


def _from_to(source: int, target: int) -> str:
    return f"call from {source} to {target}"


def _is_ours(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    size = _CREDENTIALS.size
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(_CREDENTIALS.unpack(told)[1] == os.getuid())


class SignedStore(dist.Store):  # type: ignore[name-defined]
    """A store of torch's, for Python and for its process groups.

    Attributes:
        secret: that entries are signed with.
    """

    def __init__(self, store: dist.Store, secret: Secret, prefix: str = "") -> None:  # type: ignore[name-defined]
        """`prefix`: of all keys."""
        super().__init__()
        self.secret = secret
        self._store = store
        self._prefix = prefix

    def below(self, prefix: str) -> SignedStore:
        """The same store, with a prefix for all keys."""
        return SignedStore(self._store, self.secret, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str | bytes) -> None:
        """Write an entry."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        key = self._prefix + key
        self._store.set(key, self.secret.signature(key, content) + content)

    def get(self, key: str) -> bytes:
        """An entry, waited for. Raises ForeignEntryError, and RuntimeError as torch's."""
        key = self._prefix + key
        text = bytes(self._store.get(key))
        signature, content = text[:_SIGNATURE_BYTES], text[_SIGNATURE_BYTES:]
        if not self.secret.has_signed(signature, key, content):
            raise ForeignEntryError(
                f"{key!r} in the run's store has no signature of this run: somebody else has "
                "written there, or hosts have different secrets (TIMEPREST_SECRET: "
                "docs/machines.md)"
            )
        return content

    def check(self, keys: Sequence[str]) -> bool:
        """Whether there are such entries, whoever has written them."""
        return bool(self._store.check([self._prefix + key for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for entries."""
        names = [self._prefix + key for key in keys]
        self._store.wait(names, self.timeout if timeout is None else timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which has no signature. Returns what it has now."""
        return int(self._store.add(self._prefix + key, amount))

    def delete_key(self, key: str) -> bool:
        """Remove an entry."""
        return bool(self._store.delete_key(self._prefix + key))
