"""What a GPU is for a host with several sockets: its place on the bus, and a pool in parts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kvdock_server.numa import Socket, Topology
from kvdock_server.tiers.host.pool import Pool
from kvdock_server.transfer.devices.driver import load_driver

pytestmark = pytest.mark.gpu

NBYTES = 128 << 20


def test_linux_knows_the_device_by_the_name_that_cuda_gives() -> None:
    pci_id = load_driver().pci_id(0)
    assert re.fullmatch(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.0", pci_id)
    if not Path("/sys/bus/pci/drivers/nvidia").exists():
        pytest.skip("no PCI devices in this container's /sys")
    assert (Path("/sys/bus/pci/devices") / pci_id.lower() / "numa_node").exists()


def test_a_pool_that_was_bound_in_parts_is_pinned_and_copied_as_one() -> None:
    # Twice the same node by two policies, so that the mapping has two parts on any host.
    node = int(re.findall(r"\d+", Path("/sys/devices/system/node/has_memory").read_text())[0])
    sockets = Socket((node,), frozenset(), 1), Socket((node, node), frozenset(), 1)
    pool = Pool(NBYTES, Topology(sockets, {node: 0}))
    try:
        if pool.placement.refused:
            pytest.skip(pool.placement.refused)
        shares = pool.placement.shares
        assert [share.nbytes for share in shares] == [NBYTES // 2] * 2
        host = np.frombuffer(pool.segment.view, dtype=np.uint8)
        written = np.random.default_rng(1).integers(0, 256, NBYTES, np.uint8)
        host[:] = written

        driver = load_driver()
        driver.set_current(driver.retain_context(0))
        device, stream = driver.allocate(NBYTES), driver.create_stream()
        driver.register_host(pool.segment.address, NBYTES)
        driver.copy_to_device(device, pool.segment.address, NBYTES, stream)
        driver.synchronize_stream(stream)
        host[:] = 0
        driver.copy_to_host(pool.segment.address, device, NBYTES, stream)
        driver.synchronize_stream(stream)
        np.testing.assert_array_equal(host, written)
        driver.unregister_host(pool.segment.address)
        driver.free(device)
        driver.destroy_stream(stream)
    finally:
        pool.stop()
