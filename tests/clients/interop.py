"""Checks a client in another language against a real server and against the Python client.

    python tests/clients/interop.py CLIENT [ARGUMENT ...]

The client is a command that is called in these ways. It ends with exit status 0 if and only if all
went well. ADDRESS is a server's, unix:///PATH.

    CLIENT - check-keys FILE
        derives the keys of all vectors of FILE (docs/key_vectors.json) and compares them
    CLIENT ADDRESS put NAMESPACE LIST
        stores the chunks of LIST, in their order
    CLIENT ADDRESS get NAMESPACE LIST
        fetches the chunks of LIST and writes their bytes; fails if one is not there
    CLIENT ADDRESS follow NAMESPACE COUNT
        follows the events, from a snapshot on, until COUNT chunks of the namespace are known, and
        prints their keys, one a line
    CLIENT ADDRESS all
        its own checks. It starts servers on ADDRESS with the command in $KVDOCK_SERVER (cut at
        spaces) and options behind it, kills them, and prints a row for each thing checked

NAMESPACE is registered, has one shard a part, and one group without index. LIST is a text file with
a line for each chunk, from a prompt's first on: the key in hexadecimal digits, a space, and the
path of the file that has (put) or gets (get) the bytes.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvdock import ChunkStatus, Client, Group, KVDockError, Namespace
from kvdock.keys import chunk_keys

VECTORS = Path(__file__).parents[2] / "docs" / "key_vectors.json"
SERVER = [sys.executable, "-m", "kvdock_server"]
CHUNK_TOKENS = 16
SHARD_BYTES = 300_001  # more than two messages, and no multiple of anything
NAMESPACE = Namespace("interop", CHUNK_TOKENS, 1, [Group((SHARD_BYTES,))])
SECONDS = 60.0


@contextmanager
def server(address: str) -> Iterator[None]:
    options = ["--memory", "64MiB", "--event-log", "1MiB", "--log-level", "warning"]
    process = subprocess.Popen([*SERVER, "--listen", address, *options])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def row(what: str, seen: str) -> None:
    print(f"{what:<28} {seen}", flush=True)


def check(what: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        raise SystemExit(f"{what}: {seen}, not {wanted}")


def write_list(folder: Path, keys: Sequence[bytes], shards: Sequence[bytes] = ()) -> Path:
    """A list of the chunks, and the files of those whose bytes are given."""
    folder.mkdir()
    lines = []
    for number, key in enumerate(keys):
        path = folder / str(number)
        lines.append(f"{key.hex()} {path}\n")
        if shards:
            path.write_bytes(shards[number])
    (folder / "list").write_text("".join(lines))
    return folder / "list"


class Checked:
    """A client in another language, and the folder for the files of its checks."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.command = command
        self.folder = folder
        self.address = f"unix://{folder}/interop.sock"

    def run(self, *arguments: str | Path, address: str | None = None) -> int:
        command = [*self.command, address or self.address, *map(str, arguments)]
        environment = {**os.environ, "KVDOCK_SERVER": " ".join(SERVER)}
        return subprocess.run(command, env=environment, timeout=SECONDS, check=False).returncode

    def must_fail(self, *arguments: str | Path, address: str | None = None) -> None:
        command = [*self.command, address or self.address, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
        if done.returncode == 0:
            raise SystemExit(f"{arguments[0]} should have failed")

    def check_keys(self) -> None:
        check("check-keys", self.run("check-keys", VECTORS, address="-"), 0)
        document = json.loads(VECTORS.read_text())
        last = next(vector for vector in reversed(document["vectors"]) if vector["keys"])
        last["keys"][-1] = bytes(32).hex()
        wrong = self.folder / "wrong.json"
        wrong.write_text(json.dumps(document))
        self.must_fail("check-keys", wrong, address="-")
        row("keys", f"{len(document['vectors'])} vectors; a wrong one is noticed")

    def exchange(self) -> None:
        """Python reads what the client puts, the client reads and follows what Python puts."""
        tokens = [int.from_bytes(secrets.token_bytes(4)) for _ in range(5 * CHUNK_TOKENS)]
        keys = chunk_keys(tokens, CHUNK_TOKENS)
        shards = [secrets.token_bytes(SHARD_BYTES) for _ in keys]
        with server(self.address), Client(self.address) as python:
            wait_for(python)
            python.register_namespace(NAMESPACE)
            theirs = write_list(self.folder / "theirs", keys[:2], shards[:2])
            check("put", self.run("put", NAMESPACE.name, theirs), 0)
            check("bytes that Python read", python.get(NAMESPACE.name, keys[:2]), shards[:2])
            row("put, Python gets", f"2 chunks of {SHARD_BYTES} random bytes equal")

            follow = subprocess.Popen(
                [*self.command, self.address, "follow", NAMESPACE.name, "4"],
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                time.sleep(1)  # so that it mostly has the snapshot before more is stored
                statuses = python.put(NAMESPACE.name, keys[2:4], shards[2:4], parent=keys[1])
                check("Python's put", statuses, [ChunkStatus.STORED] * 2)
                told = follow.communicate(timeout=SECONDS)[0].split()
            finally:
                follow.kill()
            check("follow's exit status", follow.returncode, 0)
            check("keys followed", sorted(told), sorted(key.hex() for key in keys[:4]))
            row("follow", "2 chunks of the client's and 2 of Python's")

            ours = write_list(self.folder / "ours", keys[2:4])
            check("get", self.run("get", NAMESPACE.name, ours), 0)
            got = [(ours.parent / str(number)).read_bytes() for number in range(2)]
            check("bytes that the client read", got == shards[2:4], True)
            self.must_fail("get", NAMESPACE.name, write_list(self.folder / "none", keys[4:]))
            row("Python puts, get", "2 chunks equal; one that is not there is an error")


def wait_for(client: Client) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            client.status(timeout=1)
        except KVDockError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvdock-") as name:
        client = Checked(sys.argv[1:], Path(name))
        client.check_keys()
        check("all", client.run("all", address=f"unix://{name}/all.sock"), 0)
        client.exchange()
    row("all checks passed", f"in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
