"""Fixtures of the client's tests: a namespace, and chunks to put into it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest

import kvdock

SHARD_BYTES = 3 << 19  # More than one message, and no whole number of them.


@dataclass(frozen=True)
class Prompt:
    """Some chunks of a prompt that no other test has."""

    namespace: str = "test"
    keys: list[bytes] = field(default_factory=lambda: [os.urandom(32) for _ in range(4)])
    shards: list[bytes] = field(default_factory=lambda: [os.urandom(SHARD_BYTES) for _ in range(4)])


@pytest.fixture
def namespace() -> kvdock.Namespace:
    return kvdock.Namespace("test", 256, 1, (kvdock.Group(shard_bytes=(SHARD_BYTES,)),))


@pytest.fixture
def prompt() -> Prompt:
    return Prompt()
