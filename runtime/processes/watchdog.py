"""A watchdog process: kills a worker that is stopped for good.

``python -m timeprest.runtime.processes.watchdog PID SECONDS``

On one host the other workers see that one is stopped (SIGSTOP), and end it. Where all of a host's
workers are stopped, nobody there could. So in runs over several hosts each worker starts a small
process that looks at it twice a second. When it has stood still for longer than the others wait,
the run is over, and it is killed; its launcher then ends too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil

LOOK_S = 0.5

SLACK_S = 30.0
"""Beyond the longest wait for a message: that the others have given up is certain."""


def watch(seconds: float) -> None:
    """Have this process ended when it stands still for so long. The watchdog ends with it."""
    with contextlib.suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), str(seconds)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # What stops the worker's process group mustn't stop this.
            start_new_session=True,
        )


def main(arguments: list[str]) -> int:
    """Look at a process until it has ended. Returns the exit code."""
    pid, most_s = int(arguments[0]), float(arguments[1])
    still_s = 0.0
    # Another parent means that this one is gone, and its number may be somebody else's.
    while os.getppid() == pid:
        try:
            stopped = psutil.Process(pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return 0
        still_s = still_s + LOOK_S if stopped else 0.0
        if still_s > most_s:
            os.kill(pid, signal.SIGKILL)
            return 0
        time.sleep(LOOK_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
