"""Running programs as another user, where the tests run as root.

The other users are numbers that no host gives to anybody. They may read what root may, since the
interpreter and the checkout can be in root's own folders; they write only what is theirs.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys

import pytest

OTHER, ANOTHER = 54_321, 54_322


def as_user(uid: int) -> list[str]:
    """The beginning of a command line that runs the rest as that user, in no group but its own."""
    user = ["--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
    may_read = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    # No bytecode: it would be the other user's, where that may write at all.
    return ["setpriv", *user, *may_read, "env", "PYTHONDONTWRITEBYTECODE=1"]


@functools.cache
def _possible() -> bool:
    if os.getuid() != 0 or not shutil.which("setpriv"):
        return False
    command = [*as_user(OTHER), sys.executable, "-c", "import kvdock_server"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


needs_other_users = pytest.mark.skipif(
    not _possible(), reason="only root can run a program as another user (setpriv)"
)
