"""Who gives the blocks of stores away waits for their copies, and not for the server."""

from __future__ import annotations

import threading
import time

import pytest

from kvdock_vllm.engine import block_readers
from kvdock_vllm.engine.block_readers import BlockReader, BlockReaders
from kvdock_vllm.engine.copier import CopyStoppedError

LONG = 60.0


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> BlockReaders:
    monkeypatch.setattr(block_readers, "_ANSWER_SECONDS", 0.05)
    return BlockReaders()


def waits(readers: BlockReaders, *waiting: BlockReader) -> bool:
    """Whether they let go; AssertionError if that takes the whole time."""
    began = time.monotonic()
    answer = readers.wait(waiting, LONG)
    assert time.monotonic() - began < LONG / 2
    return answer


def test_a_store_that_the_server_keeps_waiting_is_not_waited_for_nor_who_is_behind_it(
    readers: BlockReaders,
) -> None:
    first, second = BlockReader(), BlockReader()
    assert not readers.is_late
    readers.begin(first)
    assert not waits(readers, first)
    assert not waits(readers, second)
    assert readers.is_late
    readers.give_up(first)
    assert waits(readers, first), "it reads nothing, and never will"
    with pytest.raises(CopyStoppedError), readers.reading(first):
        pass
    readers.end(first)
    assert not readers.is_late
    readers.end(second)
    assert waits(readers, second)


def test_who_waits_sees_that_the_thread_begins_another_and_that_the_server_is_late(
    readers: BlockReaders,
) -> None:
    store = BlockReader()
    waited: list[bool] = []
    engine = threading.Thread(target=lambda: waited.append(waits(readers, store)))
    engine.start()
    while not readers._changed._waiters:  # type: ignore[attr-defined]
        time.sleep(0.001)
    readers.begin(store)
    engine.join()
    assert waited == [False]


def test_a_copy_is_waited_for_also_when_it_was_given_up(readers: BlockReaders) -> None:
    store = BlockReader()
    reading, go_on = threading.Event(), threading.Event()

    def copy() -> None:
        readers.begin(store)
        with readers.reading(store):
            reading.set()
            assert go_on.wait(LONG)

    thread = threading.Thread(target=copy)
    thread.start()
    assert reading.wait(LONG)
    assert not readers.wait([store], 4 * block_readers._ANSWER_SECONDS)
    assert not readers.is_late
    readers.give_up(store)
    assert not readers.wait([store], 4 * block_readers._ANSWER_SECONDS)
    go_on.set()
    assert waits(readers, store)
    thread.join()
