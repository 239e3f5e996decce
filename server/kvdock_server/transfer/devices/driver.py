"""The few functions of the CUDA driver that transfers need, through ctypes.

They are not called through CuPy, because every call here must release the interpreter lock. Opening
and closing IPC handles, making a context, querying and recording events can each wait for the
driver. CuPy 14 keeps the lock in all of them, so a hung worker would stop the whole server. ctypes
always releases the lock. (CuPy compiles the kernels, see kernels.py.)

No CUDA toolkit is needed: libcuda comes with the GPU's kernel driver.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Mapping, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from typing import NamedTuple, TypeAlias

import numpy as np

from kvdock_server.transfer.devices import libcuda
from kvdock_server.transfer.plans.arrays import U64

logger = logging.getLogger(__name__)

_Number: TypeAlias = c_int | c_void_p | libcuda.DevicePtr


class CudaError(Exception):
    """A call of the driver failed. ``code`` is its CUresult."""

    def __init__(self, call: str, code: int, name: str, meaning: str) -> None:
        super().__init__(f"{call} failed: {name} ({code}): {meaning}")
        self.code = code


class CudaUnavailableError(Exception):
    """This host has no usable CUDA driver or device. The message says what is missing."""


class Side(NamedTuple):
    """One side of some rectangles: the address of each, and its pitch in bytes."""

    address: U64
    pitch: U64


class Driver:
    """libcuda with checked calls. Handles, addresses and contexts are plain integers.

    Every method raises CudaError if the driver refuses. Methods that give something back only log
    the refusal, since everything is given back when the process ends.

    From ``ipc_open_memory`` on, a context must be current on the calling thread (``set_current``).
    """

    def __init__(self) -> None:
        """CudaUnavailableError if there is no driver, or it finds no device."""
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
            self._declare(libcuda.SIGNATURES)
        except (OSError, AttributeError) as error:
            raise CudaUnavailableError(f"no usable CUDA driver on this host: {error}") from error
        try:
            self._call("cuInit", 0)
            self.version = self._answer(c_int(), "cuDriverGetVersion")
        except CudaError as error:
            raise CudaUnavailableError(f"the CUDA driver does not start: {error}") from error
        self.has_batch_copy = self.version >= libcuda.BATCH_COPY_SINCE
        if self.has_batch_copy:
            self._declare(libcuda.BATCH_SIGNATURES)
        self._attributes = libcuda.MemcpyAttributes(
            src_access_order=libcuda.SRC_ACCESS_ORDER_STREAM
        )
        self._first_index = c_size_t(0)

    def device_uuids(self) -> list[bytes]:
        """The 16-byte UUID of every visible device, by ordinal."""
        uuids = []
        for ordinal in range(self._answer(c_int(), "cuDeviceGetCount")):
            uuid = libcuda.Uuid()
            self._call("cuDeviceGetUuid_v2", byref(uuid), self._device(ordinal))
            uuids.append(bytes(uuid.bytes))
        return uuids

    def device_name(self, ordinal: int) -> str:
        name = ctypes.create_string_buffer(96)
        self._call("cuDeviceGetName", name, len(name), self._device(ordinal))
        return name.value.decode()

    def pci_id(self, ordinal: int) -> str:
        """The device's address on the PCI bus, as in ``0000:19:00.0``."""
        address = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", address, len(address), self._device(ordinal))
        return address.value.decode()

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        """True if device ``ordinal`` can address memory of device ``peer``."""
        devices = self._device(ordinal), self._device(peer)
        return bool(self._answer(c_int(), "cuDeviceCanAccessPeer", *devices))

    def retain_context(self, ordinal: int) -> int:
        """The device's primary context. It takes some 500 MiB of the device's memory."""
        return self._answer(c_void_p(), "cuDevicePrimaryCtxRetain", self._device(ordinal))

    def set_current(self, context: int) -> None:
        """Make a context the current one of the calling thread."""
        self._call("cuCtxSetCurrent", context)

    def set_current_to_close(self, context: int) -> None:
        """As ``set_current``, before something is given back: raises nothing."""
        self._give_back("cuCtxSetCurrent", context)

    def ipc_open_memory(self, handle: bytes) -> int:
        """Map another process's allocation of device memory; its address here.

        The mapping is made for the device whose context is current. Kernels of this device can use
        the address, and copies from this device to the address run at the speed of NVLink. Copies
        from any other device are staged through the host, silently, at a tenth of the speed.
        """
        return self._answer(
            libcuda.DevicePtr(),
            "cuIpcOpenMemHandle_v2",
            libcuda.Handle.from_buffer_copy(handle),
            libcuda.IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
        )

    def ipc_handle(self, base: int) -> bytes:
        """The 64-byte handle by which another process maps this process's allocation."""
        handle = libcuda.Handle()
        self._call("cuIpcGetMemHandle", byref(handle), base)
        return bytes(handle.reserved)

    def ipc_close_memory(self, address: int) -> None:
        self._give_back("cuIpcCloseMemHandle", address)

    def ipc_open_event(self, handle: bytes) -> int:
        opaque = libcuda.Handle.from_buffer_copy(handle)
        return self._answer(c_void_p(), "cuIpcOpenEventHandle", opaque)

    def allocation(self, address: int) -> tuple[int, int]:
        """Base and size in bytes of the allocation that has this address."""
        base, size = libcuda.DevicePtr(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return base.value, size.value

    def allocate(self, nbytes: int) -> int:
        """The address of ``nbytes`` of the current device's memory."""
        return self._answer(libcuda.DevicePtr(), "cuMemAlloc_v2", nbytes)

    def free(self, address: int) -> None:
        self._give_back("cuMemFree_v2", address)

    def allocate_host(self, nbytes: int) -> int:
        """The address of ``nbytes`` of host memory, pinned for every context."""
        return self._answer(c_void_p(), "cuMemHostAlloc", nbytes, libcuda.MEMHOSTALLOC_PORTABLE)

    def free_host(self, address: int) -> None:
        self._give_back("cuMemFreeHost", address)

    def register_host(self, address: int, nbytes: int) -> None:
        """Pin existing host memory for every context."""
        self._call("cuMemHostRegister_v2", address, nbytes, libcuda.MEMHOSTREGISTER_PORTABLE)

    def unregister_host(self, address: int) -> None:
        self._give_back("cuMemHostUnregister", address)

    def create_stream(self) -> int:
        """A stream that waits for no other stream."""
        flags = libcuda.STREAM_NON_BLOCKING
        return self._answer(c_void_p(), "cuStreamCreateWithPriority", flags, 0)

    def destroy_stream(self, stream: int) -> None:
        self._give_back("cuStreamDestroy_v2", stream)

    def synchronize_stream(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def wait_event(self, stream: int, event: int) -> None:
        """Work that is queued on the stream from now on starts when the event is done."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def create_event(self) -> int:
        """An event without timing. Threads that wait for it spin."""
        return self._answer(c_void_p(), "cuEventCreate", libcuda.EVENT_DISABLE_TIMING)

    def destroy_event(self, event: int) -> None:
        self._give_back("cuEventDestroy_v2", event)

    def record_event(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def query_event(self, event: int) -> bool:
        """True if all work before the event's last record is done."""
        code = self._cuda.cuEventQuery(event)
        if code == libcuda.CUDA_ERROR_NOT_READY:
            return False
        self._check("cuEventQuery", code)
        return True

    def synchronize_event(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def copy_to_host(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", host, device, nbytes, stream)

    def copy_to_device(self, device: int, host: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", device, host, nbytes, stream)

    def copy_between(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """From device memory to device memory, of the same device or of another one."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, nbytes, stream)

    def copy_batch(self, targets: U64, sources: U64, sizes: U64, stream: int) -> None:
        """Copies between device and pinned host memory, or between devices, all in one call.

        The driver does the copies in any order. It has read the arrays when this returns.
        """
        columns = [np.ascontiguousarray(column) for column in (targets, sources, sizes)]
        self._call(
            "cuMemcpyBatchAsync",
            *(column.ctypes.data for column in columns),
            len(sizes),
            byref(self._attributes),
            byref(self._first_index),
            1,
            byref(c_size_t()),
            stream,
        )

    def copy_rectangles(
        self, targets: Side, sources: Side, width: U64, height: U64, stream: int
    ) -> None:
        """2-D copies between device and pinned host memory, or between devices, all in one call.

        A loop of calls would wait for the interpreter lock after each of them.
        """
        copies = np.zeros(len(width), dtype=libcuda.RECTANGLE_COPY)
        for name, side in (("target", targets), ("source", sources)):
            copies[name]["type"] = libcuda.MEMCPY_OPERAND_POINTER
            copies[name]["address"] = side.address
            copies[name]["row_length"] = side.pitch
            copies[name]["layer_height"] = height
        copies["width"] = width
        copies["height"] = height
        copies["depth"] = 1
        copies["source_access_order"] = libcuda.SRC_ACCESS_ORDER_STREAM
        fail_index = c_size_t()
        self._call(
            "cuMemcpy3DBatchAsync", len(copies), copies.ctypes.data, byref(fail_index), 0, stream
        )

    def copy_2d(self, copy: libcuda.Memcpy2D, stream: int) -> None:
        self._call("cuMemcpy2DAsync_v2", byref(copy), stream)

    def launch(
        self,
        function: int,
        blocks: int,
        threads: int,
        stream: int,
        arguments: Sequence[ctypes._CData],
    ) -> None:
        """Queue a kernel on ``blocks`` times ``threads`` threads.

        The driver has read the arguments when this returns.
        """
        pointers = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._call(
            "cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None
        )

    def _declare(self, signatures: Mapping[str, Sequence[type]]) -> None:
        for name, signature in signatures.items():
            function = getattr(self._cuda, name)
            function.argtypes = signature
            function.restype = c_int

    def _device(self, ordinal: int) -> int:
        return self._answer(c_int(), "cuDeviceGet", ordinal)

    def _answer(self, answer: _Number, name: str, *arguments: object) -> int:
        """Call a function that writes a number to its first argument; the number."""
        self._call(name, byref(answer), *arguments)
        assert answer.value is not None
        return answer.value

    def _give_back(self, name: str, argument: int) -> None:
        try:
            self._call(name, argument)
        except CudaError as error:
            logger.warning("%s", error)

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._cuda, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code == libcuda.CUDA_SUCCESS:
            return
        texts = []
        for describe in (self._cuda.cuGetErrorName, self._cuda.cuGetErrorString):
            text = c_char_p()
            describe(code, byref(text))
            texts.append((text.value or b"unknown error").decode())
        raise CudaError(name, code, *texts)


@functools.cache
def load_driver() -> Driver:
    """The process's one Driver. CudaUnavailableError if there is none."""
    return Driver()
