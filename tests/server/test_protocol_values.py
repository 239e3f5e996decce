"""The domain's enums have the protocol's values, so that rpc/ converts by number."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from kvdock.v1 import session_pb2
from kvdock.v1 import types_pb2 as types
from kvdock_server.core.sessions import Mode, Role
from kvdock_server.index.namespace import GroupKind
from kvdock_server.service.chunk_status import ChunkStatus


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (ChunkStatus, types.ChunkStatus, "CHUNK_STATUS_"),
        (GroupKind, types.GroupKind, "GROUP_KIND_"),
        (Mode, types.TransferMode, "TRANSFER_MODE_"),
        (Role, session_pb2.SessionRole, "SESSION_ROLE_"),
    ],
)
def test_values_are_the_protocols(ours: type[Enum], theirs: Any, prefix: str) -> None:
    known = {name.removeprefix(prefix): value for name, value in theirs.items() if value}
    assert {each.name: each.value for each in ours} == known
