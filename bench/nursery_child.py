"""The process of a nursery: see nursery.py.

    python nursery_child.py SOCKET SEED

Each message on the socket, whose file descriptor is SOCKET, holds arguments and environment, as
JSON, and file descriptors: a pipe that tells the fork's process id and in the end its status, a
line each; standard input, output and errors; and what the seed's ``run`` gets. The end of the
socket ends this process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_MOST_DESCRIPTORS = 8


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    seed = Path(sys.argv[2])
    sys.path.insert(0, str(seed.parent))
    run = import_module(seed.stem).run
    assert threading.active_count() == 1, "a fork has only the thread that forks"
    while True:
        message, descriptors, *_ = socket.recv_fds(channel, 1 << 20, _MOST_DESCRIPTORS)
        if not message:
            return
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
        if not os.fork():
            channel.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            keep(run, descriptors, **json.loads(message))
        for descriptor in descriptors:
            os.close(descriptor)


def keep(
    run: Any, descriptors: list[int], arguments: list[str], environment: dict[str, str]
) -> NoReturn:
    """Call ``run`` in a child and tell how the child ended; does not return."""
    status, *theirs = descriptors
    child = os.fork()
    if child:
        for descriptor in {*theirs, 0, 1, 2}:
            os.close(descriptor)
        os.write(status, b"%d\n" % child)
        _, ended = os.waitpid(child, 0)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
        os._exit(0)
    os.close(status)
    for target, source in enumerate(theirs[:3]):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(environment)
    run(arguments, theirs[3:])
    raise AssertionError("run came back")


if __name__ == "__main__":
    main()
