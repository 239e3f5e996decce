from enum import IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.types import (
    ChunkEventData,
    ChunkStatus,
    Group,
    GroupKind,
    Hit,
    Lease,
    Namespace,
    SessionRole,
    TransferMode,
)
from kvdock.v1 import cache_pb2, types_pb2

groups = st.builds(
    Group,
    kind=st.sampled_from(GroupKind),
    group_idx=st.none() | st.integers(0, 63),
    window_tokens=st.integers(0, 2**20),
    attention_chunk_tokens=st.integers(0, 2**20),
    shard_bytes=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
)
namespaces = st.builds(
    Namespace,
    name=st.text("abc", min_size=1),
    chunk_tokens=st.integers(1, 65_536),
    kv_world_size=st.integers(1, 4_096),
    groups=st.lists(groups, min_size=1, max_size=4).map(tuple),
    labels=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3),
)
extra_values = st.text(max_size=4) | st.binary(max_size=4) | st.integers(-(1 << 63), (1 << 63) - 1)
extra_keys = extra_values | st.lists(extra_values, max_size=3).map(tuple)
event_data = st.builds(
    ChunkEventData,
    block_hashes=st.lists(st.binary(max_size=4), max_size=3).map(tuple),
    extra_keys=st.lists(st.lists(extra_keys, max_size=3).map(tuple), max_size=3).map(tuple),
)


@given(namespaces)
def test_a_namespace_survives_the_wire(namespace: Namespace) -> None:
    wire = namespace.to_proto().SerializeToString()

    assert Namespace.from_proto(type(namespace.to_proto()).FromString(wire)) == namespace


@given(event_data)
def test_event_data_survives_the_wire(data: ChunkEventData) -> None:
    wire = data.to_proto().SerializeToString()

    assert ChunkEventData.from_proto(types_pb2.ChunkEventData.FromString(wire)) == data


@pytest.mark.parametrize("key", [None, True, 1.5, 1 << 63, "\ud800", ["a"], (("a",),), (None,)])
def test_an_extra_key_that_would_not_arrive_as_it_is_is_refused(key: object) -> None:
    with pytest.raises(ValueError, match=r"extra key|out of range|surrogates"):
        ChunkEventData(extra_keys=((key,),)).to_proto()  # type: ignore[arg-type]


def test_an_extra_key_that_only_a_newer_client_tells_is_none() -> None:
    message = types_pb2.ChunkEventData(extra_keys=[types_pb2.ExtraKeys()])
    keys = message.extra_keys[0].keys
    keys.add().MergeFromString(b"\x18\x01")  # field 3
    keys.add(value=types_pb2.ExtraValue())
    keys.add(tuple=types_pb2.ExtraTuple(values=[types_pb2.ExtraValue(text="a"), {}]))

    assert ChunkEventData.from_proto(message).extra_keys == ((None, None, ("a", None)),)


def test_no_group_and_group_0_differ() -> None:
    assert Group.from_proto(Group((1,), group_idx=None).to_proto()).group_idx is None
    assert Group.from_proto(Group((1,), group_idx=0).to_proto()).group_idx == 0


def test_a_miss_has_no_lease() -> None:
    assert Hit.from_proto(cache_pb2.LookupResponse(epoch=7)) == Hit(7, 0, None, ())
    assert Hit.from_proto(cache_pb2.LookupResponse(epoch=7, lease_id=3)).lease == Lease(3, 7)


@pytest.mark.parametrize("enum", [ChunkStatus, GroupKind, SessionRole, TransferMode])
def test_a_value_that_only_a_newer_server_knows_is_unspecified(enum: type[IntEnum]) -> None:
    assert enum(99).name == "UNSPECIFIED"
    assert enum(99) == 0


def test_a_namespace_with_a_kind_that_only_a_newer_server_knows_can_be_read() -> None:
    message = types_pb2.Namespace(name="n")
    message.groups.add().MergeFromString(b"\x10\x63")  # kind, 99

    (group,) = Namespace.from_proto(message).groups
    assert group.kind is GroupKind.UNSPECIFIED
