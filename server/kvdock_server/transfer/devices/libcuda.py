"""Constants, types and signatures of libcuda, as far as driver.py calls it."""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_ulonglong,
    c_void_p,
)

import numpy as np

CUDA_SUCCESS = 0
CUDA_ERROR_INVALID_VALUE = 1
CUDA_ERROR_NOT_READY = 600
CUDA_ERROR_NOT_SUPPORTED = 801

BATCH_COPY_SINCE = 12_080  # version of the driver
IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
MEMHOSTREGISTER_PORTABLE = 1
MEMHOSTALLOC_PORTABLE = 1
MEMORYTYPE_HOST = 1
MEMORYTYPE_DEVICE = 2
SRC_ACCESS_ORDER_STREAM = 1
MEMCPY_OPERAND_POINTER = 1

DevicePtr = ctypes.c_uint64
SizePtr = POINTER(c_size_t)


class Handle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle: 64 bytes, passed by value."""

    _fields_ = [("reserved", c_ubyte * 64)]


class Uuid(ctypes.Structure):
    _fields_ = [("bytes", c_ubyte * 16)]


class MemLocation(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class MemcpyAttributes(ctypes.Structure):
    _fields_ = [
        ("src_access_order", c_int),
        ("src_loc_hint", MemLocation),
        ("dst_loc_hint", MemLocation),
        ("flags", c_uint),
    ]


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        ("src_x_in_bytes", c_size_t),
        ("src_y", c_size_t),
        ("src_memory_type", c_uint),
        ("src_host", c_void_p),
        ("src_device", DevicePtr),
        ("src_array", c_void_p),
        ("src_pitch", c_size_t),
        ("dst_x_in_bytes", c_size_t),
        ("dst_y", c_size_t),
        ("dst_memory_type", c_uint),
        ("dst_host", c_void_p),
        ("dst_device", DevicePtr),
        ("dst_array", c_void_p),
        ("dst_pitch", c_size_t),
        ("width_in_bytes", c_size_t),
        ("height", c_size_t),
    ]


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


def rectangle(
    device: int, host: int, width: int, height: int, device_pitch: int, host_pitch: int, *,
    to_host: bool,
) -> Memcpy2D:  # fmt: skip
    """A copy of ``height`` rows of ``width`` bytes between host and device memory."""
    copy = Memcpy2D(width_in_bytes=width, height=height)
    if to_host:
        copy.src_memory_type, copy.dst_memory_type = MEMORYTYPE_DEVICE, MEMORYTYPE_HOST
        copy.src_device, copy.dst_host = device, host
        copy.src_pitch, copy.dst_pitch = device_pitch, host_pitch
    else:
        copy.src_memory_type, copy.dst_memory_type = MEMORYTYPE_HOST, MEMORYTYPE_DEVICE
        copy.src_host, copy.dst_device = host, device
        copy.src_pitch, copy.dst_pitch = host_pitch, device_pitch
    return copy


# Arguments of the functions. All of them return a CUresult.
SIGNATURES: dict[str, list[type]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [POINTER(c_char), c_int, c_int],
    "cuDeviceGetPCIBusId": [POINTER(c_char), c_int, c_int],
    "cuDeviceGetUuid_v2": [POINTER(Uuid), c_int],
    "cuDeviceCanAccessPeer": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuIpcGetMemHandle": [POINTER(Handle), DevicePtr],
    "cuIpcOpenMemHandle_v2": [POINTER(DevicePtr), Handle, c_uint],
    "cuIpcCloseMemHandle": [DevicePtr],
    "cuIpcOpenEventHandle": [POINTER(c_void_p), Handle],
    "cuMemGetAddressRange_v2": [POINTER(DevicePtr), SizePtr, DevicePtr],
    "cuMemAlloc_v2": [POINTER(DevicePtr), c_size_t],
    "cuMemFree_v2": [DevicePtr],
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
    "cuMemcpyDtoHAsync_v2": [c_void_p, DevicePtr, c_size_t, c_void_p],
    "cuMemcpyHtoDAsync_v2": [DevicePtr, c_void_p, c_size_t, c_void_p],
    "cuMemcpyDtoDAsync_v2": [DevicePtr, DevicePtr, c_size_t, c_void_p],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, *[POINTER(c_void_p)] * 2],
    "cuMemcpy2DAsync_v2": [POINTER(Memcpy2D), c_void_p],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
}

# Since BATCH_COPY_SINCE. The symbols without suffix are those of CUDA 12.8, with fail_index, and
# they stay.
BATCH_SIGNATURES: dict[str, list[type]] = {
    "cuMemcpyBatchAsync": [
        *[c_void_p] * 3,
        c_size_t,
        POINTER(MemcpyAttributes),
        SizePtr,
        c_size_t,
        SizePtr,
        c_void_p,
    ],
    "cuMemcpy3DBatchAsync": [c_size_t, c_void_p, SizePtr, c_ulonglong, c_void_p],
}
