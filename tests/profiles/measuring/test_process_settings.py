"""What a process is set to: freed memory kept, and given back."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: what is set goes for the whole of one.
PROGRAM = """
import ctypes
import psutil
from timeprest.profiles.measuring.process_settings import freed_memory_kept, keep_freed_memory

c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
c.free.argtypes = [ctypes.c_void_p]
SIZE = 64 * 2**20

def held():
    "Whether memory of this size stays with the process once it is freed."
    before = psutil.Process().memory_info().rss
    block = c.malloc(SIZE)
    ctypes.memset(block, 1, SIZE)
    c.free(block)
    return psutil.Process().memory_info().rss - before > SIZE / 2

print(held())
with freed_memory_kept():
    print(held())
print(held())
keep_freed_memory()
with freed_memory_kept():
    pass
print(held())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_freed_memory_is_kept_while_asked():
    """And for good, where the process is one of ours."""
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False", "True"]


PUTS_BACK = """
import sys
from timeprest.profiles.measuring.process_settings import settings_put_back
with settings_put_back():
    pass
assert not [name for name in sys.modules if name.startswith("torch._inductor")]
"""


def test_the_compiler_is_not_loaded_to_put_back_what_is_as_it_was():
    """It takes seconds, at the end of every run, and of one that a signal ends too."""
    subprocess.run([sys.executable, "-c", PUTS_BACK], check=True, timeout=100)
