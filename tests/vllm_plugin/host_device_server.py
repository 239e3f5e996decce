"""The real server, with a device that is a file: host_driver.py in place of CUDA.

    python host_device_server.py FILE [arguments of kvdock_server]

The file is the one allocation that workers can register, under HANDLE. SIGUSR1 makes the device
fail.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "server" / "transfer"))
from host_driver import Exported, HostDriver

from kvdock_server.__main__ import main
from kvdock_server.transfer import gpu
from kvdock_server.transfer.devices import kernels
from kvdock_server.transfer.devices.driver import CudaError

HANDLE = b"H" * 64


def fail(name: str) -> None:
    raise CudaError(name, 214, "CUDA_ERROR_ECC_UNCORRECTABLE", "as when memory is broken")


if __name__ == "__main__":
    descriptor = os.open(sys.argv.pop(1), os.O_RDWR)
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    driver = HostDriver()
    driver.exported[HANDLE] = Exported(0, np.frombuffer(memory, np.uint8), descriptor)
    signal.signal(signal.SIGUSR1, lambda *_: setattr(driver, "before_call", fail))
    gpu.load_driver = lambda: driver  # type: ignore[assignment,return-value]
    kernels.missing = lambda: "there are no kernels for host memory"
    sys.exit(main())
