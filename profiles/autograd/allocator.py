"""Keeping freed memory for the next step, as PyTorch's allocator does on a GPU.

glibc maps every allocation over 32 MiB anew and hands freed memory back to the system, so each
training step pays for page faults again: a third of a backward of a network with 500 MB of
gradients, and more for a whole model than for its layers one by one.
"""

from __future__ import annotations

import ctypes
import sys

# Numbers of mallopt's parameters (malloc.h); a trim threshold of -1 stands for never.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed, for this whole process; on Linux with glibc alone.

    For processes of our own, the commands and the stages: it is theirs to decide, not a library's
    that is called from another program.

    Returns:
        Whether that was possible.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 64 * 2**20))
    done = [mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(done)
