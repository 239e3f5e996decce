"""All that the server's verbs need, over one core."""

from __future__ import annotations

from kvdock_server.core import Core
from kvdock_server.service.loads import DeviceLoads
from kvdock_server.service.memory import RegisteredMemory
from kvdock_server.tiers.host.pool import Pool
from kvdock_server.transfer import GpuTransfers


class Service:
    """What ``rpc`` hands to the functions of ``service``; it calls ``core`` itself."""

    def __init__(self, core: Core, pool: Pool, transfers: GpuTransfers) -> None:
        self.core = core
        self.pool = pool
        self.memory = RegisteredMemory(core, transfers)
        self.loads = DeviceLoads(core, self.memory)
