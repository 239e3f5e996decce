"""A stand-in for the CUDA driver whose devices are host memory, for machines without a GPU.

It keeps the driver's rules that the transfers rely on. A handle is opened once at a time in each
context and closed once, in the context that opened it, when nothing touches the memory any more.
Opened in another device's context it has an address of its own there, and only so may bytes be
copied to it from that device. Host memory is registered once, a copy may not cross the border of a
registration, batches want registered memory, and events belong to whoever made or opened them.

What is queued on a stream happens when somebody waits for something or asks whether it is done.
With ``others_first`` all other streams' work happens before it: what does not wait for what it
needs on another stream comes too early then, and brings the wrong bytes. Without, all happens as
late as can be: what is taken away before it happened is missed.

Threads of several devices use it at once, so its tables are gone through as copies: others open,
allocate, register and make streams meanwhile. A dict's ``copy`` lets no thread in between; a list
of its items may, when tuples are collected as garbage.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.devices.driver import CudaError, Side
from kvdock_server.transfer.devices.libcuda import Memcpy2D
from kvdock_server.transfer.plans.arrays import U64

UUID = bytes(range(16))
MOVE_BLOCKS, COPY_TO_PEER = 1, 2
KERNELS = {"move_blocks": MOVE_BLOCKS, "copy_to_peer": COPY_TO_PEER}
"""What stands for the functions that CuPy would make."""

Bytes = npt.NDArray[np.uint8]
Method = TypeVar("Method", bound=Callable[..., Any])


def _may_fail(method: Method) -> Method:
    """A call that CUDA can refuse, and does when ``before_call`` raises."""

    @functools.wraps(method)
    def call(self: HostDriver, *arguments: Any) -> Any:
        self.before_call(method.__name__)
        return method(self, *arguments)

    return cast("Method", call)


def uuid(ordinal: int) -> bytes:
    """UUID of the device; the first one's is ``UUID``."""
    return bytes([ordinal]) + UUID[1:]


@dataclass
class Exported:
    """Memory of another process on one device."""

    ordinal: int
    bytes: Bytes
    fd: int

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.fd)

    def again(self) -> Bytes:
        """The same memory at another address."""
        return np.frombuffer(mmap.mmap(self.fd, len(self.bytes)), dtype=np.uint8)


@dataclass
class Opened:
    """A handle that is open in a context."""

    handle: bytes
    context: int
    bytes: Bytes


@dataclass
class Stream:
    """Work of one context; the first ``done`` operations have happened."""

    context: int
    queued: list[tuple[Sequence[int], Callable[[], object]]] = field(default_factory=list)
    done: int = 0


class HostDriver:
    """See above. ``peers`` are the pairs of devices of which the first reaches the second."""

    version = 13_000
    has_batch_copy = True

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices
        self.peers = {(one, two) for one in range(devices) for two in range(devices) if one != two}
        self.exported: dict[bytes, Exported] = {}
        self.refused: set[tuple[int, bytes]] = set()
        """(context, handle) that cannot be opened."""
        self.opened: dict[int, Opened] = {}
        self.allocated: dict[int, Bytes] = {}
        self.registered: dict[int, int] = {}
        self.ready_events: set[bytes] = set()
        self.events: dict[int, bytes] = {}
        """Opened, by their handles."""
        self.made: set[int] = set()
        """Streams and events."""
        self.log: list[str] = []
        self.launched: set[int] = set()
        self.before_call: Callable[[str], None] = lambda name: None
        """Called with the name of each method that may fail; raises if it is to."""
        self.before_copy: Callable[[int, int, int], None] = lambda target, source, nbytes: None
        """Called with the addresses of both sides before each copy happens."""
        self.others_first = True
        self.refuse_copies_to: set[bytes] = set()
        """Handles of memory that no copy can be queued to."""
        self._current = threading.local()
        self._lock = threading.RLock()
        self._streams: dict[int, Stream] = {}
        self._recorded: dict[int, tuple[Stream, int]] = {}
        self._names = itertools.count(1000)

    def export(self, nbytes: int, ordinal: int = 0) -> tuple[bytes, Bytes]:
        """Memory of another process on a device: its handle, and its bytes."""
        fd = os.memfd_create("device-memory")
        os.ftruncate(fd, nbytes)
        memory = np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)
        handle = len(self.exported).to_bytes(64, "little")
        self.exported[handle] = Exported(ordinal, memory, fd)
        return handle, memory

    def opened_for(self, ordinal: int) -> list[bytes]:
        """The handles that are open in the device's context."""
        opened = self.opened.copy().values()
        return [each.handle for each in opened if each.context == ordinal + 1]

    def assert_all_given_back(self) -> None:
        """Nothing is held of what can be given back."""
        assert self.opened == {}
        assert self.registered == {}
        assert self.allocated == {}
        assert self.events == {}
        assert self.made == set()

    # Devices and contexts. The context of a device is its ordinal plus 1.

    def device_uuids(self) -> list[bytes]:
        return [uuid(ordinal) for ordinal in range(self.devices)]

    def device_name(self, ordinal: int) -> str:
        return f"host {ordinal}"

    def pci_id(self, ordinal: int) -> str:
        return f"0000:{ordinal:02X}:00.0"

    @_may_fail
    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        return (ordinal, peer) in self.peers

    def retain_context(self, ordinal: int) -> int:
        return ordinal + 1

    @_may_fail
    def set_current(self, context: int) -> None:
        self.set_current_to_close(context)

    def set_current_to_close(self, context: int) -> None:
        assert 1 <= context <= self.devices
        self._current.context = context

    @property
    def current(self) -> int:
        return int(self._current.context)

    # Memory

    @_may_fail
    def ipc_open_memory(self, handle: bytes) -> int:
        context = self.current
        if handle not in self.exported or (context, handle) in self.refused:
            raise _error("cuIpcOpenMemHandle_v2")
        opened_before = [(opened.context, opened.handle) for opened in self.opened.copy().values()]
        assert (context, handle) not in opened_before, "opened twice"
        self.log.append("open")
        memory = self.exported[handle]
        seen = memory.bytes if memory.ordinal == context - 1 else memory.again()
        address = int(seen.ctypes.data)
        self.opened[address] = Opened(handle, context, seen)
        return address

    def ipc_close_memory(self, address: int) -> None:
        with self._lock:
            opened = self.opened.pop(address)
            assert opened.context == self.current, "closed in another context"
            for stream in self._streams.copy().values():
                for touched, _ in stream.queued[stream.done :]:
                    for each in touched:
                        assert not address <= each < address + len(opened.bytes), "closed in use"
        self.log.append("close")

    @_may_fail
    def allocation(self, address: int) -> tuple[int, int]:
        return address, len(self.opened[address].bytes)

    @_may_fail
    def allocate(self, nbytes: int) -> int:
        memory: Bytes = np.zeros(nbytes, np.uint8)
        address = int(memory.ctypes.data)
        self.allocated[address] = memory
        return address

    allocate_host = allocate

    def free(self, address: int) -> None:
        del self.allocated[address]

    free_host = free

    @_may_fail
    def register_host(self, address: int, nbytes: int) -> None:
        assert address not in self.registered
        self.registered[address] = nbytes

    def unregister_host(self, address: int) -> None:
        del self.registered[address]

    # Streams and events

    @_may_fail
    def ipc_open_event(self, handle: bytes) -> int:
        event = self.create_event()
        self.events[event] = handle
        return event

    @_may_fail
    def create_stream(self) -> int:
        stream = self._make()
        self._streams[stream] = Stream(self.current)
        return stream

    def destroy_stream(self, stream: int) -> None:
        with self._lock:
            self._run_last(self._streams[stream], len(self._streams[stream].queued))
        del self._streams[stream]
        self.made.remove(stream)

    @_may_fail
    def synchronize_stream(self, stream: int) -> None:
        with self._lock:
            self._run_last(self._streams[stream], len(self._streams[stream].queued))

    @_may_fail
    def create_event(self) -> int:
        return self._make()

    def destroy_event(self, event: int) -> None:
        self.events.pop(event, None)
        self.made.remove(event)

    @_may_fail
    def record_event(self, event: int, stream: int) -> None:
        with self._lock:
            recorded = self._streams[stream]
            self._recorded[event] = recorded, len(recorded.queued)

    @_may_fail
    def wait_event(self, stream: int, event: int) -> None:
        with self._lock:
            if event in self._recorded:
                recorded, position = self._recorded[event]
                self._queue(stream, (), lambda: self._run(recorded, position))

    @_may_fail
    def query_event(self, event: int) -> bool:
        if event in self.events:
            return self.events[event] in self.ready_events
        self.synchronize_event(event)
        return True

    @_may_fail
    def synchronize_event(self, event: int) -> None:
        with self._lock:
            if event in self._recorded:
                self._run_last(*self._recorded[event])

    @property
    def is_copying(self) -> bool:
        """Something that was queued will still touch memory."""
        with self._lock:
            streams = self._streams.copy().values()
            return any(touched for one in streams for touched, _ in one.queued[one.done :])

    def discard_queued(self) -> None:
        """The device failed: what has not happened yet never will."""
        with self._lock:
            for stream in self._streams.copy().values():
                del stream.queued[stream.done :]

    # Copies

    @_may_fail
    def copy_to_host(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self._copy(host, device, nbytes, stream)

    @_may_fail
    def copy_to_device(self, device: int, host: int, nbytes: int, stream: int) -> None:
        self._copy(device, host, nbytes, stream)

    copy_between = copy_to_device

    @_may_fail
    def copy_batch(self, targets: U64, sources: U64, sizes: U64, stream: int) -> None:
        columns = targets, sources, sizes
        for target, source, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            for host in (target, source):
                assert self.device_of(host) is not None or self._registration(host) is not None, (
                    "a batch of memory that is not registered"
                )
            self._copy(target, source, nbytes, stream)

    @_may_fail
    def copy_rectangles(
        self, targets: Side, sources: Side, width: U64, height: U64, stream: int
    ) -> None:
        rows: Sequence[Any] = (*targets, *sources, width, height)
        for target, target_pitch, source, source_pitch, nbytes, count in zip(
            *(column.tolist() for column in rows), strict=True
        ):
            assert nbytes <= target_pitch, "rows overlap"
            assert nbytes <= source_pitch, "rows overlap"
            for side, pitch in ((target, target_pitch), (source, source_pitch)):
                last = side + (count - 1) * pitch + nbytes - 1
                if self.device_of(side) is None:
                    assert self._registration(side) == self._registration(last) is not None
                else:
                    assert self._mapping(side) == self._mapping(last)
            for row in range(count):
                self._copy(target + row * target_pitch, source + row * source_pitch, nbytes, stream)

    @_may_fail
    def copy_2d(self, copy: Memcpy2D, stream: int) -> None:
        for row in range(copy.height):
            target = (copy.dst_host or copy.dst_device) + row * copy.dst_pitch
            source = (copy.src_host or copy.src_device) + row * copy.src_pitch
            self._copy(target, source, copy.width_in_bytes, stream)

    @_may_fail
    def launch(
        self, function: int, blocks: int, threads: int, stream: int, arguments: Sequence[Any]
    ) -> None:
        """One of the kernels of the server, which are known by their number."""
        self.launched.add(function)
        if function == MOVE_BLOCKS:
            self._move_blocks(stream, arguments)
        else:
            assert function == COPY_TO_PEER
            self._copy_to_peer(stream, arguments)

    def _move_blocks(self, stream: int, arguments: Sequence[Any]) -> None:
        *columns, many, buffer, block_bytes, segments, regions, _, gather = (
            argument.value for argument in arguments[:-1]
        )
        count = segments // regions
        table = [_read(column, ctypes.c_uint64, regions) for column in columns]
        ids = _read(many, ctypes.c_uint32, count) if many else list(arguments[-1])[:count]
        for index, block in enumerate(ids):
            for device, stride, nbytes, offset in zip(*table, strict=True):
                page, staged = device + block * stride, buffer + index * block_bytes + offset
                target, source = (staged, page) if gather else (page, staged)
                self._copy(target, source, nbytes, stream)

    def _copy_to_peer(self, stream: int, arguments: Sequence[Any]) -> None:
        *columns, segments, pairs, _ = (argument.value for argument in arguments[:-1])
        table = [_read(column, ctypes.c_uint64, pairs) for column in columns]
        for block in list(arguments[-1])[: segments // pairs]:
            for source, source_stride, target, target_stride, nbytes in zip(*table, strict=True):
                self._copy(
                    target + block * target_stride, source + block * source_stride, nbytes, stream
                )

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        with self._lock:
            context = self._streams[stream].context
            assert context == self.current, "a stream of another context"
            sides = self.device_of(target), self.device_of(source)
            assert sides != (None, None), "a copy with no device side"
            for address, ordinal in zip((target, source), sides, strict=True):
                if ordinal is None:
                    last = self._registration(address + nbytes - 1)
                    if self._registration(address) != last:
                        raise _error("a copy across the border of a registration")
                else:
                    mapping = self._mapping(address)
                    assert mapping == self._mapping(address + nbytes - 1), "beyond the memory"
                    if mapping in self.opened:
                        opened = self.opened[mapping]
                        assert opened.context == context, "an address of another context"
                        if opened.handle in self.refuse_copies_to and address == target:
                            raise _error("a copy to where none can be")
            assert sides[1] in (None, context - 1), "a copy from another device"

            def move() -> None:
                self.before_copy(target, source, nbytes)
                ctypes.memmove(target, source, nbytes)

            self._queue(stream, (target, source), move)

    def _make(self) -> int:
        name = next(self._names)
        self.made.add(name)
        return name

    def _queue(self, stream: int, touched: Sequence[int], work: Callable[[], object]) -> None:
        self._streams[stream].queued.append((touched, work))

    def _run_last(self, stream: Stream, until: int) -> None:
        if self.others_first:
            for other in self._streams.copy().values():
                if other is not stream:
                    self._run(other, len(other.queued))
        self._run(stream, until)

    def _run(self, stream: Stream, until: int) -> None:
        while stream.done < min(until, len(stream.queued)):
            _, work = stream.queued[stream.done]
            work()
            stream.done += 1

    def _mapping(self, address: int) -> int | None:
        """Where the device memory begins in which the address lies."""
        for base, opened in self.opened.copy().items():
            if base <= address < base + len(opened.bytes):
                return base
        for base, memory in self.allocated.copy().items():
            if base <= address < base + len(memory):
                return base
        return None

    def device_of(self, address: int) -> int | None:
        """The device on which the address's memory lies."""
        base = self._mapping(address)
        if base is None:
            return None
        if base in self.opened:
            return self.exported[self.opened[base].handle].ordinal
        return self.current - 1

    def _registration(self, address: int) -> int | None:
        for base, nbytes in self.registered.copy().items():
            if base <= address < base + nbytes:
                return base
        return None


def _read(address: int, kind: Any, count: int) -> list[int]:
    return [int(value) for value in (kind * count).from_address(address)]


def _error(call: str) -> CudaError:
    return CudaError(call, 1, "CUDA_ERROR_INVALID_VALUE", "invalid argument")
