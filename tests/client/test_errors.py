import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from kvdock import errors
from kvdock._protocol import again, session_lost
from kvdock.v1 import types_pb2


class FailedCall(grpc.RpcError):
    """What gRPC raises, as far as the mapping looks at it."""

    def __init__(self, code: grpc.StatusCode, details: str, *infos: ErrorInfo | RetryInfo) -> None:
        self._code, self._details, self._infos = code, details, infos

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> list[tuple[str, bytes | str]]:
        if not self._infos:
            return [("other", "text")]
        status = Status()
        for info in self._infos:
            status.details.add().Pack(info)
        return [("grpc-status-details-bin", status.SerializeToString())]


def test_every_reason_of_the_protocol_has_a_class() -> None:
    names = {name.removeprefix("ERROR_REASON_") for name, _ in types_pb2.ErrorReason.items()}

    assert names - {"UNSPECIFIED"} == set(errors.CLASS_OF_REASON)


@pytest.mark.parametrize("reason", sorted(errors.CLASS_OF_REASON))
def test_the_reason_decides_on_both_ways(reason: str) -> None:
    cls = errors.CLASS_OF_REASON[reason]
    code = cls.default_code

    call = errors.from_rpc_error(
        FailedCall(code, "what to do", ErrorInfo(domain="kvdock", reason=reason)), "host:1"
    )
    stream = errors.from_stream_error(
        types_pb2.Error(code=code.value[0], message="what to do", reason=reason)
    )

    for error in (call, stream):
        assert type(error) is cls
        assert (error.code, error.reason) == (code, reason)
        assert error.message == "what to do"


@pytest.mark.parametrize(
    ("seconds", "retry_after"), [(2, 2.0), (0, None), (-5, None), (1 << 60, float(1 << 60))]
)
def test_any_delay_may_be_told(seconds: int, retry_after: float | None) -> None:
    retry = RetryInfo()
    retry.retry_delay.seconds = seconds
    info = ErrorInfo(domain="kvdock", reason="DRAINING")
    call = errors.from_rpc_error(
        FailedCall(grpc.StatusCode.UNAVAILABLE, "stopping", info, retry), "host:1"
    )
    assert (type(call), call.retry_after) == (errors.Draining, retry_after)


def test_details_that_cannot_be_decoded_hide_no_error() -> None:
    class FromAProxy(FailedCall):
        def trailing_metadata(self) -> list[tuple[str, bytes | str]]:
            return [("grpc-status-details-bin", b"\xff")]

    call = errors.from_rpc_error(FromAProxy(grpc.StatusCode.DEADLINE_EXCEEDED, "late"), "host:1")
    assert type(call) is errors.DeadlineExceeded


def test_what_is_told_for_programs_comes_on_both_ways() -> None:
    info = ErrorInfo(domain="kvdock", reason="DRAINING", metadata={"limit": "7"})
    retry = RetryInfo()
    retry.retry_delay.FromMilliseconds(1_500)
    unavailable = grpc.StatusCode.UNAVAILABLE

    call = errors.from_rpc_error(FailedCall(unavailable, "text", info, retry), "host:1")
    stream = errors.from_stream_error(
        types_pb2.Error(
            code=14, message="text", reason="DRAINING", metadata={"limit": "7"}, retry_ms=1_500
        )
    )
    bare = errors.from_rpc_error(FailedCall(unavailable, "text"), "host:1")
    foreign = ErrorInfo(domain="example.com", metadata={"limit": "7"})
    other = errors.from_rpc_error(FailedCall(unavailable, "text", foreign, retry), "host:1")

    for error in (call, stream, again(call), session_lost(stream)):
        assert (error.metadata, error.retry_after) == ({"limit": "7"}, 1.5)
    for error in (bare, other):
        assert (error.metadata, error.retry_after) == ({}, None)


def test_without_a_reason_the_code_decides() -> None:
    def of(code: grpc.StatusCode) -> errors.KVDockError:
        return errors.from_rpc_error(FailedCall(code, "text"), "host:1")

    assert type(of(grpc.StatusCode.UNAVAILABLE)) is errors.Unavailable
    assert type(of(grpc.StatusCode.DEADLINE_EXCEEDED)) is errors.DeadlineExceeded
    assert "host:1 did not answer in time" in of(grpc.StatusCode.DEADLINE_EXCEEDED).message
    assert type(of(grpc.StatusCode.INVALID_ARGUMENT)) is errors.InvalidArgument
    assert type(of(grpc.StatusCode.RESOURCE_EXHAUSTED)) is errors.ServerError


def test_what_a_server_writes_is_one_printable_line() -> None:
    told = types_pb2.Error(code=13, message="a\nkvdock: forged\x1b[2J", reason="INTERNAL")

    error = errors.from_stream_error(told)

    assert error.message == str(error) == r"a\nkvdock: forged\x1b[2J"


def test_a_connection_that_ends_while_grpc_aio_writes_is_no_fault_of_the_server() -> None:
    failed = FailedCall(grpc.StatusCode.INTERNAL, "Internal error from Core")
    ours = ErrorInfo(domain="kvdock", reason="INTERNAL")
    told = FailedCall(grpc.StatusCode.INTERNAL, "Internal error from Core", ours)

    error = errors.from_rpc_error(failed, "host:1")

    assert type(error) is errors.Unavailable
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert error.message.startswith("no KVDock server answers at host:1: the connection ended.")
    assert type(errors.from_rpc_error(told, "host:1")) is errors.ServerError


def test_a_reason_of_another_domain_is_not_ours() -> None:
    info = ErrorInfo(domain="example.com", reason="UNKNOWN_NAMESPACE")

    error = errors.from_rpc_error(FailedCall(grpc.StatusCode.NOT_FOUND, "text", info), "host:1")

    assert type(error) is errors.ServerError


def test_no_server_says_where_it_was_sought_and_what_to_do() -> None:
    failed = FailedCall(
        grpc.StatusCode.UNAVAILABLE,
        "failed to connect to all addresses; last error: UNKNOWN: unix:/k.sock: connect failed: "
        "addr: unix:/k.sock error: No such file or directory",
    )

    message = errors.from_rpc_error(failed, "unix:///k.sock").message

    assert message == (
        "no KVDock server answers at unix:///k.sock: No such file or directory. Start one with "
        "`kvdock serve`, or say where it is with KVDOCK_ADDRESS"
    )
