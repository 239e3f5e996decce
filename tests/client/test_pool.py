import dataclasses
import gc
import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvdock import trust
from kvdock.errors import InvalidArgument, PoolUnmappable
from kvdock.liveness import ServerProcess
from kvdock.pool import Pool
from kvdock.types import Location, Segment

NBYTES = 4 << 20


@pytest.fixture
def segment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Segment]:
    segment = Segment(3, f"/kvdock-0-{secrets.token_hex(8)}", NBYTES, os.urandom(32))
    # A folder of its own: any server that starts removes such files, which no server holds locked.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvdock-test-") as folder:
        monkeypatch.setattr(trust, "_SHM_FOLDER", Path(folder))
        path = path_of(segment)
        path.touch(0o600)
        path.write_bytes(b"\0" * NBYTES + segment.proof)
        yield segment


@pytest.fixture
def pool(segment: Segment) -> Iterator[Pool]:
    pool = Pool([segment], server="test", is_local=True)
    yield pool
    pool.close()


def path_of(segment: Segment) -> Path:
    return trust._SHM_FOLDER / segment.shm_name.removeprefix("/")


def test_a_view_writes_through(pool: Pool, segment: Segment) -> None:
    pool.view(Location(3, 100, 4))[:] = b"kvkv"

    assert path_of(segment).read_bytes()[98:106] == b"\0\0kvkv\0\0"


def test_an_array_shares_the_bytes_of_the_view(pool: Pool) -> None:
    array = pool.array(Location(3, 8, 4))
    array[:] = 7

    assert array.dtype == np.uint8
    assert bytes(pool.view(Location(3, 8, 4))) == b"\x07" * 4


def test_views_outlive_the_pool_and_the_name(pool: Pool, segment: Segment) -> None:
    view = pool.view(Location(3, 0, 16))
    path_of(segment).unlink()
    pool.close()
    gc.collect()

    view[:] = b"still mapped...."
    assert bytes(view) == b"still mapped...."


def mappings_of(segment: Segment) -> int:
    return Path("/proc/self/maps").read_text().count(segment.shm_name)


def test_the_mapping_ends_with_the_last_view(pool: Pool, segment: Segment) -> None:
    view = pool.view(Location(3, 0, 16))
    pool.close()
    assert mappings_of(segment) == 1

    view.release()
    del view
    gc.collect()
    assert mappings_of(segment) == 0


@pytest.mark.parametrize(
    "location", [Location(3, NBYTES - 1, 2), Location(3, -1, 1), Location(3, 9, -5)]
)
def test_a_location_outside_the_segment_is_refused(pool: Pool, location: Location) -> None:
    with pytest.raises(InvalidArgument, match="not within segment 3"):
        pool.view(location)


def test_an_unknown_segment_is_refused(pool: Pool) -> None:
    with pytest.raises(InvalidArgument, match="no segment 4"):
        pool.view(Location(4, 0, 1))


def test_a_closed_pool_maps_nothing_more(pool: Pool) -> None:
    pool.close()

    with pytest.raises(InvalidArgument, match="closed"):
        pool.view(Location(3, 0, 1))


def test_a_pool_of_another_host_cannot_be_mapped(segment: Segment) -> None:
    with pytest.raises(PoolUnmappable, match="another host"):
        Pool([segment], server="host:1", is_local=False).view(Location(3, 0, 1))


def test_a_missing_or_foreign_segment_says_what_to_look_at(segment: Segment) -> None:
    missing = Segment(0, "/kvdock-0-0123456789abcdef", NBYTES)
    with pytest.raises(PoolUnmappable, match=r"No such file.*share /dev/shm"):
        Pool([missing], server="test", is_local=True).view(Location(0, 0, 1))

    larger = Segment(0, segment.shm_name, NBYTES * 2)
    with pytest.raises(PoolUnmappable, match="do both processes see the same /dev/shm"):
        Pool([larger], server="test", is_local=True).view(Location(0, 0, 1))


def refusal(segment: Segment) -> str:
    """Why the pool is not mapped, and the server's end not looked for, in that file."""
    with pytest.raises(PoolUnmappable) as raised:
        Pool([segment], server="test", is_local=True).view(Location(3, 0, 1))
    assert ServerProcess([segment]).has_ended() is None
    return raised.value.message


@pytest.mark.parametrize(
    "form", ["/{}", "/../..{}", "{}", "/dev/shm/../..{}", "/kvdock-0-x/../..{}"]
)
def test_no_file_but_one_of_a_servers_own_form_is_opened(
    segment: Segment, tmp_path: Path, form: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(path_of(segment).read_bytes())
    victim.chmod(0o600)

    named = dataclasses.replace(segment, shm_name=form.format(victim))

    assert "no KVDock server does" in refusal(named)


@pytest.mark.parametrize("name", ["/kvdock-0-0123456789abcdeF", "/kvdock-0-0123456789abcdef\n", ""])
def test_a_name_that_only_resembles_a_servers_is_none(segment: Segment, name: str) -> None:
    assert "no KVDock server does" in refusal(dataclasses.replace(segment, shm_name=name))


def test_a_file_that_does_not_hold_the_proof_is_not_the_servers(segment: Segment) -> None:
    assert "not the one that the server sent" in refusal(
        dataclasses.replace(segment, proof=os.urandom(32))
    )
    assert "has 0 bytes" in refusal(dataclasses.replace(segment, proof=b""))
    # What lies within the pool proves nothing.
    smaller = dataclasses.replace(segment, nbytes=NBYTES - 32, proof=bytes(32))
    assert "not the one that the server sent" in refusal(smaller)


def test_what_is_no_file_of_this_users_alone_is_not_the_servers(segment: Segment) -> None:
    path = path_of(segment)
    path.chmod(0o640)
    assert "others may open it (mode 0640)" in refusal(segment)
    path.chmod(0o600)
    if os.getuid() == 0:
        os.chown(path, 54_321, 54_321)
        assert "belongs to user 54321" in refusal(segment)
        os.chown(path, 0, 0)

    real = path.rename(path.with_name(f"{path.name}-real"))
    path.symlink_to(real)
    assert "symbolic links" in refusal(segment)
    real.replace(path)
    assert bytes(Pool([segment], server="test", is_local=True).view(Location(3, 0, 1))) == b"\0"
    path.unlink()
    os.mkfifo(path, 0o600)
    assert "no regular file" in refusal(segment)


def resident_bytes(segment: Segment) -> int:
    """How much of the segment this process has in its page tables."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if segment.shm_name in line:
            rss = next(line for line in lines if line.startswith("Rss:"))
            return int(rss.split()[1]) * 1024
    return 0


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 5
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_prefault_enters_all_pages(pool: Pool, segment: Segment) -> None:
    pool.prefault()

    wait_until(lambda: resident_bytes(segment) == NBYTES)


def test_prefault_waits_for_pages_that_the_server_has_not_made(segment: Segment) -> None:
    path = path_of(segment)
    path.unlink()
    path.touch(0o600)
    with path.open("wb") as file:
        os.pwrite(file.fileno(), segment.proof, NBYTES)
    pool = Pool([segment], server="test", is_local=True)
    pool.prefault()
    time.sleep(0.3)
    assert path.stat().st_blocks * 512 == mmap.PAGESIZE  # that of the proof

    with path.open("r+b") as file, mmap.mmap(file.fileno(), NBYTES) as server:
        server[:] = b"\1" * NBYTES
    wait_until(lambda: resident_bytes(segment) == NBYTES)
    pool.close()
