"""Between the supervisor and SGLang: ends the server, with all that it has started, whatever becomes of either.

    python -m node.sglang.leash GRACE_S COMMAND …

Standard input closes (the supervisor stops it, or is dead): SIGTERM to the server, GRACE_S to end, then SIGKILL to its
process group. SIGTERM to the leash: SIGKILL at once. The server ends by itself: SIGKILL to what is left of its group,
which may hold a card's memory. Exits as the server did, with 128 + the signal that ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def main(grace_s: float, command: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _at_once)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_die_with_parent)
    try:
        ended, _, _ = select.select([os.pidfd_open(server.pid), sys.stdin], [], [])
        if sys.stdin in ended and server.poll() is None:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(grace_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def _at_once(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def _die_with_parent() -> None:
    """In the server, before it is one: also when the leash itself is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
