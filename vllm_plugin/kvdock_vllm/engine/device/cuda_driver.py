"""The functions of the CUDA driver that the connector needs and torch does not offer.

They are called through ctypes, which frees the interpreter's lock for each call. They work on any
thread: a device context is made current for as long as it is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_MEMHOSTREGISTER_PORTABLE = 1


class CudaError(Exception):
    """A call of the driver failed, or there is no driver. The message names call and error."""


_Handle = ctypes.c_ubyte * 64
_Uuid = ctypes.c_ubyte * 16
_DevicePtr = ctypes.c_uint64
_SIGNATURES: dict[str, list[type]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDeviceGetUuid_v2": [ctypes.POINTER(_Uuid), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuDevicePrimaryCtxRelease_v2": [ctypes.c_int],
    "cuCtxPushCurrent_v2": [ctypes.c_void_p],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(ctypes.c_void_p)],
    "cuMemGetAddressRange_v2": [
        ctypes.POINTER(_DevicePtr),
        ctypes.POINTER(ctypes.c_size_t),
        _DevicePtr,
    ],
    "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), _DevicePtr],
    "cuMemHostRegister_v2": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint],
    "cuMemHostUnregister": [ctypes.c_void_p],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}


class Driver:
    """libcuda with checked calls. Devices are ordinals, as torch counts them."""

    def __init__(self) -> None:
        """Raises CudaError if this process has no driver, or it finds no device."""
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"no CUDA driver in this process: {error}") from error
        for name, signature in _SIGNATURES.items():
            function = getattr(self._cuda, name)
            function.argtypes = signature
            function.restype = ctypes.c_int
        self._call("cuInit", 0)

    @contextmanager
    def context_of(self, ordinal: int) -> Iterator[None]:
        """Makes the device's primary context, which torch uses too, current on this thread.

        The methods below that take addresses need one.
        """
        device = self._device(ordinal)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(context))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)

    def device_uuid(self, ordinal: int) -> bytes:
        """The 16 bytes that name the device in every process."""
        uuid = _Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), self._device(ordinal))
        return bytes(uuid)

    def allocation(self, address: int) -> tuple[int, int]:
        """Base and size in bytes of the allocation that has this address."""
        base, nbytes = _DevicePtr(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), address)
        return base.value, nbytes.value

    def ipc_handle(self, base: int) -> bytes:
        """The 64-byte handle by which another process opens an allocation."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle)

    def register_host(self, address: int, nbytes: int) -> None:
        """Pins existing host memory for every device."""
        self._call("cuMemHostRegister_v2", address, nbytes, _MEMHOSTREGISTER_PORTABLE)

    def unregister_host(self, address: int) -> None:
        """Undoes :meth:`register_host`. No copy may be under way there."""
        self._call("cuMemHostUnregister", address)

    def _device(self, ordinal: int) -> int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device.value

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            meaning = (text.value or b"an unknown error").decode()
            raise CudaError(f"{name} failed with {meaning} ({code})")
