"""The ``kvdock`` command.

Each subcommand is a function that takes the parsed arguments and returns the exit status: 0 for
success, 1 for a failure, 2 for arguments that cannot be used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvdock.errors import InvalidArgument, KVDockError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with ``arguments``; None: with those of the process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "serve":
        from kvdock.cli.serve import serve

        # The server explains and checks its own arguments.
        serve(arguments[1:])

    from kvdock.cli.arguments import parse

    _replace_closed_streams()
    parsed = parse(arguments)
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except InvalidArgument as error:
        print(f"kvdock: {error}", file=sys.stderr)
        return 2
    except KVDockError as error:
        print(f"kvdock: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader closed the pipe: it has seen enough.
        _discard_stdout()
        return 0
    except OSError as error:
        _discard_stdout()
        print(f"kvdock: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _replace_closed_streams() -> None:
    """Puts /dev/null in place of standard streams that are closed (``>&-`` in a shell)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def _discard_stdout() -> None:
    """Keeps Python from failing once more when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
