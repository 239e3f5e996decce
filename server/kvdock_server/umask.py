"""Files that nobody else may open, made by a library that does not ask for a mode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def private_files() -> Iterator[None]:
    """Within it the process makes files of mode 0600. For the whole process: use it at start."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
