"""All of the server's verbs that wait, over one core."""

from __future__ import annotations

from kvdock_server.core import Core
from kvdock_server.service.inline import Inline
from kvdock_server.service.memory import RegisteredMemory
from kvdock_server.service.retrieve import Retrieves
from kvdock_server.service.store import DeviceStores
from kvdock_server.tiers.host.pool import Pool
from kvdock_server.transfer import GpuTransfers


class Service:
    """What rpc/ calls: ``core`` for what is done at once, the others for what waits."""

    def __init__(self, core: Core, pool: Pool, transfers: GpuTransfers) -> None:
        self.core = core
        self.memory = RegisteredMemory(core, transfers)
        self.stores = DeviceStores(core, self.memory)
        self.retrieves = Retrieves(core, self.memory)
        self.inline = Inline(core, pool)
