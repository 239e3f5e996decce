import gc
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvdock.errors import InvalidArgument, PoolUnmappable
from kvdock.pool import Pool
from kvdock.types import Location, Segment

NBYTES = 4 << 20


@pytest.fixture
def segment() -> Iterator[Segment]:
    name = f"kvdock-test-{os.getpid()}"
    path = Path("/dev/shm") / name
    path.write_bytes(b"\0" * NBYTES)
    yield Segment(3, f"/{name}", NBYTES)
    path.unlink(missing_ok=True)


@pytest.fixture
def pool(segment: Segment) -> Iterator[Pool]:
    pool = Pool([segment], server="test", is_local=True)
    yield pool
    pool.close()


def path_of(segment: Segment) -> Path:
    return Path("/dev/shm") / segment.shm_name.removeprefix("/")


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
    missing = Segment(0, "/kvdock-test-none", NBYTES)
    with pytest.raises(PoolUnmappable, match=r"No such file.*share /dev/shm"):
        Pool([missing], server="test", is_local=True).view(Location(0, 0, 1))

    larger = Segment(0, segment.shm_name, NBYTES * 2)
    with pytest.raises(PoolUnmappable, match="another server's"):
        Pool([larger], server="test", is_local=True).view(Location(0, 0, 1))


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
    with path.open("wb") as file:
        file.truncate(NBYTES)
    pool = Pool([segment], server="test", is_local=True)
    pool.prefault()
    time.sleep(0.3)
    assert path.stat().st_blocks == 0

    with path.open("r+b") as file, mmap.mmap(file.fileno(), NBYTES) as server:
        server[:] = b"\1" * NBYTES
    wait_until(lambda: resident_bytes(segment) == NBYTES)
    pool.close()
