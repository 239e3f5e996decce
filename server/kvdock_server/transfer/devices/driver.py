"""The few functions of the CUDA driver that transfers need, through ctypes.

Not through CuPy, because every call here must release the interpreter lock: opening and closing
IPC handles, making a context, querying and recording events can each wait for the driver, and
CuPy 14 keeps the lock in all of them. A hung worker would then stop the whole server. ctypes always
releases it. (CuPy compiles the staging kernel, see staging.py.)

Needs no CUDA toolkit: libcuda comes with the GPU's kernel driver.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_ulonglong,
    c_void_p,
)
from typing import NamedTuple

import numpy as np

from kvdock_server.transfer.plans.arrays import U64

logger = logging.getLogger(__name__)

CUDA_SUCCESS = 0
CUDA_ERROR_INVALID_VALUE = 1
CUDA_ERROR_NOT_READY = 600
CUDA_ERROR_NOT_SUPPORTED = 801

_CUDA_BATCH_COPY_SINCE = 12_080
_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_MEMHOSTREGISTER_PORTABLE = 1
_MEMHOSTALLOC_PORTABLE = 1
_MEMORYTYPE_HOST = 1
_MEMORYTYPE_DEVICE = 2
_SRC_ACCESS_ORDER_STREAM = 1
_MEMCPY_OPERAND_POINTER = 1

_DevicePtr = ctypes.c_uint64


class CudaError(Exception):
    """A call of the driver failed. ``code`` is its CUresult."""

    def __init__(self, call: str, code: int, name: str, meaning: str) -> None:
        super().__init__(f"{call} failed: {name} ({code}): {meaning}")
        self.code = code


class CudaUnavailableError(Exception):
    """This host has no usable CUDA driver or device. The message says what is missing."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle: 64 bytes, passed by value."""

    _fields_ = [("reserved", c_ubyte * 64)]


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", c_ubyte * 16)]


class _MemLocation(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _MemcpyAttributes(ctypes.Structure):
    _fields_ = [
        ("src_access_order", c_int),
        ("src_loc_hint", _MemLocation),
        ("dst_loc_hint", _MemLocation),
        ("flags", c_uint),
    ]


class Side(NamedTuple):
    """One side of rectangles: where each begins, and from one row to the next."""

    address: U64
    pitch: U64


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        ("src_x_in_bytes", c_size_t),
        ("src_y", c_size_t),
        ("src_memory_type", c_uint),
        ("src_host", c_void_p),
        ("src_device", _DevicePtr),
        ("src_array", c_void_p),
        ("src_pitch", c_size_t),
        ("dst_x_in_bytes", c_size_t),
        ("dst_y", c_size_t),
        ("dst_memory_type", c_uint),
        ("dst_host", c_void_p),
        ("dst_device", _DevicePtr),
        ("dst_array", c_void_p),
        ("dst_pitch", c_size_t),
        ("width_in_bytes", c_size_t),
        ("height", c_size_t),
    ]


_SIGNATURES: dict[str, list[type]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [POINTER(c_char), c_int, c_int],
    "cuDeviceGetUuid_v2": [POINTER(_Uuid), c_int],
    "cuDeviceCanAccessPeer": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuIpcOpenMemHandle_v2": [POINTER(_DevicePtr), _Handle, c_uint],
    "cuIpcCloseMemHandle": [_DevicePtr],
    "cuIpcOpenEventHandle": [POINTER(c_void_p), _Handle],
    "cuMemGetAddressRange_v2": [POINTER(_DevicePtr), POINTER(c_size_t), _DevicePtr],
    "cuMemGetInfo_v2": [POINTER(c_size_t), POINTER(c_size_t)],
    "cuMemAlloc_v2": [POINTER(_DevicePtr), c_size_t],
    "cuMemFree_v2": [_DevicePtr],
    "cuMemHostAlloc": [POINTER(c_void_p), c_size_t, c_uint],
    "cuMemFreeHost": [c_void_p],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostUnregister": [c_void_p],
    "cuStreamCreateWithPriority": [POINTER(c_void_p), c_uint, c_int],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventDestroy_v2": [c_void_p],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuMemcpyDtoHAsync_v2": [c_void_p, _DevicePtr, c_size_t, c_void_p],
    "cuMemcpyHtoDAsync_v2": [_DevicePtr, c_void_p, c_size_t, c_void_p],
    "cuMemcpyDtoDAsync_v2": [_DevicePtr, _DevicePtr, c_size_t, c_void_p],
    "cuLaunchKernel": [
        c_void_p,
        *[c_uint] * 6,
        c_uint,
        c_void_p,
        POINTER(c_void_p),
        POINTER(c_void_p),
    ],
    "cuMemcpy2DAsync_v2": [POINTER(Memcpy2D), c_void_p],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
}
_OPERAND = [
    ("type", "<i4"),
    ("padding", "<i4"),
    ("address", "<u8"),
    ("row_length", "<u8"),
    ("layer_height", "<u8"),
    ("location_hint", "<i4", 2),
]
RECTANGLE_COPY = np.dtype(
    [
        ("source", _OPERAND),
        ("target", _OPERAND),
        ("width", "<u8"),
        ("height", "<u8"),
        ("depth", "<u8"),
        ("source_access_order", "<i4"),
        ("flags", "<u4"),
    ]
)
"""CUDA_MEMCPY3D_BATCH_OP with pointers on both sides."""

_BATCH_3D_SIGNATURE: list[type] = [
    c_size_t,
    c_void_p,
    POINTER(c_size_t),
    c_ulonglong,
    c_void_p,
]
_BATCH_SIGNATURE: list[type] = [
    c_void_p,
    c_void_p,
    c_void_p,
    c_size_t,
    POINTER(_MemcpyAttributes),
    POINTER(c_size_t),
    c_size_t,
    POINTER(c_size_t),
    c_void_p,
]


class Driver:
    """libcuda with checked calls. Handles, addresses and contexts are plain integers.

    Except for the first six methods, a context must be current on the calling thread
    (``set_current``). Methods that give something back raise nothing: what CUDA does not take any
    more, since the device failed, goes with the process.
    """

    def __init__(self) -> None:
        """CudaUnavailableError if there is no driver, or it finds no device."""
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
            for name, signature in _SIGNATURES.items():
                function = getattr(self._cuda, name)
                function.argtypes = signature
                function.restype = c_int
        except (OSError, AttributeError) as error:
            raise CudaUnavailableError(f"no usable CUDA driver on this host: {error}") from error
        try:
            self._call("cuInit", 0)
            version = c_int()
            self._call("cuDriverGetVersion", byref(version))
        except CudaError as error:
            raise CudaUnavailableError(f"the CUDA driver does not start: {error}") from error
        self.version = version.value
        self.has_batch_copy = version.value >= _CUDA_BATCH_COPY_SINCE
        if self.has_batch_copy:
            # The symbols without suffix are those of CUDA 12.8, with fail_index. They stay.
            self._cuda.cuMemcpyBatchAsync.argtypes = _BATCH_SIGNATURE
            self._cuda.cuMemcpyBatchAsync.restype = c_int
            self._cuda.cuMemcpy3DBatchAsync.argtypes = _BATCH_3D_SIGNATURE
            self._cuda.cuMemcpy3DBatchAsync.restype = c_int
        self._attributes = _MemcpyAttributes(src_access_order=_SRC_ACCESS_ORDER_STREAM)
        self._first_index = c_size_t(0)

    def device_uuids(self) -> list[bytes]:
        """The 16-byte UUID of every visible device, by ordinal."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        uuids = []
        for ordinal in range(count.value):
            uuid = _Uuid()
            self._call("cuDeviceGetUuid_v2", byref(uuid), self._device(ordinal))
            uuids.append(bytes(uuid.bytes))
        return uuids

    def device_name(self, ordinal: int) -> str:
        name = ctypes.create_string_buffer(96)
        self._call("cuDeviceGetName", name, len(name), self._device(ordinal))
        return name.value.decode()

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        """True if the device can address memory of the other one."""
        can = c_int()
        self._call("cuDeviceCanAccessPeer", byref(can), self._device(ordinal), self._device(peer))
        return bool(can.value)

    def retain_context(self, ordinal: int) -> int:
        """The device's primary context, made if need be: some 500 MiB of its memory."""
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), self._device(ordinal))
        assert context.value is not None
        return context.value

    def set_current(self, context: int) -> None:
        """Make a context the calling thread's."""
        self._call("cuCtxSetCurrent", context)

    def set_current_to_close(self, context: int) -> None:
        """As ``set_current``, before something is given back."""
        self._give_back("cuCtxSetCurrent", context)

    def ipc_open_memory(self, handle: bytes) -> int:
        """Map another process's allocation; its address here.

        The current device is the one that can use the address, with kernels and at full speed. To
        copy from another device at the speed of NVLink the memory must be opened while that one is
        current: with an address opened on the memory's own device every kind of copy between
        devices is staged through the host, silently, at a tenth of the speed.
        """
        address = _DevicePtr()
        self._call(
            "cuIpcOpenMemHandle_v2",
            byref(address),
            _Handle.from_buffer_copy(handle),
            _IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
        )
        return address.value

    def ipc_close_memory(self, address: int) -> None:
        self._give_back("cuIpcCloseMemHandle", address)

    def ipc_open_event(self, handle: bytes) -> int:
        event = c_void_p()
        self._call("cuIpcOpenEventHandle", byref(event), _Handle.from_buffer_copy(handle))
        assert event.value is not None
        return event.value

    def allocation_bytes(self, address: int) -> int:
        """Size of the allocation that begins at ``address``."""
        base, size = _DevicePtr(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return size.value - (address - base.value)

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the current device."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, nbytes: int) -> int:
        """Device memory; CudaError with CUDA_ERROR_OUT_OF_MEMORY if there is none."""
        address = _DevicePtr()
        self._call("cuMemAlloc_v2", byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        self._give_back("cuMemFree_v2", address)

    def allocate_host(self, nbytes: int) -> int:
        """Pinned host memory, for every context."""
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), nbytes, _MEMHOSTALLOC_PORTABLE)
        assert address.value is not None
        return address.value

    def free_host(self, address: int) -> None:
        self._give_back("cuMemFreeHost", address)

    def register_host(self, address: int, nbytes: int) -> None:
        """Pin host memory that exists already, for every context."""
        self._call("cuMemHostRegister_v2", address, nbytes, _MEMHOSTREGISTER_PORTABLE)

    def unregister_host(self, address: int) -> None:
        self._give_back("cuMemHostUnregister", address)

    def create_stream(self) -> int:
        """A stream that waits for no other."""
        stream = c_void_p()
        self._call("cuStreamCreateWithPriority", byref(stream), _STREAM_NON_BLOCKING, 0)
        assert stream.value is not None
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        self._give_back("cuStreamDestroy_v2", stream)

    def synchronize_stream(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def wait_event(self, stream: int, event: int) -> None:
        """Later work of the stream starts when the event is done."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def create_event(self) -> int:
        """An event whose waiters spin."""
        event = c_void_p()
        self._call("cuEventCreate", byref(event), _EVENT_DISABLE_TIMING)
        assert event.value is not None
        return event.value

    def destroy_event(self, event: int) -> None:
        self._give_back("cuEventDestroy_v2", event)

    def record_event(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def query_event(self, event: int) -> bool:
        """True if all work before the event's record is done."""
        code = self._cuda.cuEventQuery(event)
        if code == CUDA_ERROR_NOT_READY:
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
        """From device memory to device memory, also of another device."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, nbytes, stream)

    def copy_batch(
        self, destinations: int, sources: int, sizes: int, count: int, stream: int
    ) -> None:
        """``count`` copies between device and pinned host memory, or two devices, in one call.

        The first three are addresses of arrays of uint64, which the driver has read when this
        returns. Copies of one batch are in no order.
        """
        fail_index = c_size_t()
        self._call(
            "cuMemcpyBatchAsync",
            destinations,
            sources,
            sizes,
            count,
            byref(self._attributes),
            byref(self._first_index),
            1,
            byref(fail_index),
            stream,
        )

    def copy_rectangles(
        self, targets: Side, sources: Side, width: U64, height: U64, stream: int
    ) -> None:
        """2-D copies between device and pinned host memory, or two devices, all in one call.

        A loop of calls would wait for the interpreter lock after each of them.
        """
        copies = np.zeros(len(width), dtype=RECTANGLE_COPY)
        for name, side in (("target", targets), ("source", sources)):
            copies[name]["type"] = _MEMCPY_OPERAND_POINTER
            copies[name]["address"] = side.address
            copies[name]["row_length"] = side.pitch
            copies[name]["layer_height"] = height
        copies["width"] = width
        copies["height"] = height
        copies["depth"] = 1
        copies["source_access_order"] = _SRC_ACCESS_ORDER_STREAM
        fail_index = c_size_t()
        self._call(
            "cuMemcpy3DBatchAsync",
            len(copies),
            copies.ctypes.data,
            byref(fail_index),
            0,
            stream,
        )

    def copy_2d(self, copy: Memcpy2D, stream: int) -> None:
        self._call("cuMemcpy2DAsync_v2", byref(copy), stream)

    def launch(
        self,
        function: int,
        blocks: int,
        threads: int,
        stream: int,
        arguments: Sequence[ctypes._CData],
    ) -> None:
        """Queue a kernel. The driver has read the arguments when this returns."""
        pointers = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._call(
            "cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None
        )

    def _device(self, ordinal: int) -> int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), ordinal)
        return device.value

    def _give_back(self, name: str, argument: int) -> None:
        try:
            self._call(name, argument)
        except CudaError as error:
            logger.warning("%s", error)

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._cuda, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code == CUDA_SUCCESS:
            return
        texts = []
        for describe in (self._cuda.cuGetErrorName, self._cuda.cuGetErrorString):
            text = c_char_p()
            describe(code, byref(text))
            texts.append((text.value or b"unknown error").decode())
        raise CudaError(name, code, *texts)


def rectangle_to_host(host: int, host_pitch: int, device: int, device_pitch: int) -> Memcpy2D:
    """A 2-D copy from device to host memory, its width and height still to be set."""
    return Memcpy2D(
        src_memory_type=_MEMORYTYPE_DEVICE,
        src_device=device,
        src_pitch=device_pitch,
        dst_memory_type=_MEMORYTYPE_HOST,
        dst_host=host,
        dst_pitch=host_pitch,
    )


def rectangle_to_device(host: int, host_pitch: int, device: int, device_pitch: int) -> Memcpy2D:
    """A 2-D copy from host to device memory, its width and height still to be set."""
    return Memcpy2D(
        src_memory_type=_MEMORYTYPE_HOST,
        src_host=host,
        src_pitch=host_pitch,
        dst_memory_type=_MEMORYTYPE_DEVICE,
        dst_device=device,
        dst_pitch=device_pitch,
    )


@functools.cache
def load_driver() -> Driver:
    """The process's one Driver. CudaUnavailableError if there is none."""
    return Driver()
