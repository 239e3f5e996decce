"""Turns errors of the domain into what a gRPC client sees."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from kvdock.v1 import types_pb2 as pb
from kvdock_server.errors import Reason, RequestError
from kvdock_server.rpc import limits

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
# A stream of bytes on which nothing moves for this long is given up.
STALL_SECONDS = 30.0

_DETAILS_KEY = "grpc-status-details-bin"


def as_request_error(error: Exception) -> RequestError:
    """A RequestError as it is. Any other exception is logged and told as a fault of the server."""
    if isinstance(error, RequestError):
        return error
    logger.error("a request failed by a fault of the server", exc_info=error)
    return RequestError(
        Reason.INTERNAL,
        f"a fault of the server ({type(error).__name__}): its log has more; please report it",
    )


def stalled(did: str) -> RequestError:
    """The error of a stream that is given up, since it may hold memory that others want."""
    return RequestError(
        Reason.STALLED, f"the client {did} nothing for {STALL_SECONDS:g} s: begin again"
    )


def to_proto(error: RequestError) -> pb.Error:
    """The error as a session stream carries it."""
    return pb.Error(
        code=error.reason.code.value,
        message=error.message,
        reason=error.reason.name,
        metadata=error.metadata,
        retry_ms=error.reason.retry_ms,
    )


async def abort(context: Context, error: RequestError) -> NoReturn:
    """End a call with the error's status code, message and details of google.rpc."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason.name, domain="kvdock", metadata=error.metadata
        )
    ]
    if retry_ms := error.reason.retry_ms:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(retry_ms)
        details.append(retry)
    status = status_pb2.Status(
        code=error.reason.code.value,
        message=error.message,
        details=[_packed(detail) for detail in details],
    )
    await context.abort(
        _STATUS_CODES[error.reason.code.value],
        error.message,
        trailing_metadata=((_DETAILS_KEY, status.SerializeToString()),),
    )
    raise AssertionError("abort returned")


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def unary(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Let a servicer's method check its request's limits and answer errors as status codes."""

    @functools.wraps(method)
    async def wrapped(self: object, request: Any, context: Context) -> T:
        try:
            limits.check(request)
            return await method(self, request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort(context, as_request_error(error))

    return wrapped


def streaming(method: Callable[..., AsyncIterator[T]]) -> Callable[..., AsyncIterator[T]]:
    """The same as ``unary`` for a method that answers with a stream.

    The method is a generator. However the call ends, the generator is closed before: so what it
    holds is released at once, and not by the garbage collector. A method whose requests come in a
    stream checks their limits itself.
    """

    @functools.wraps(method)
    async def wrapped(self: object, request: Any, context: Context) -> None:
        try:
            if isinstance(request, Message):
                limits.check(request)
            async with contextlib.aclosing(method(self, request, context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    async with asyncio.timeout(STALL_SECONDS):
                        await context.write(response)
        except TimeoutError:
            await abort(context, stalled("took"))
        except (grpc.aio.AbortError, grpc.aio.BaseError):
            raise
        except Exception as error:
            await abort(context, as_request_error(error))

    # grpc.aio also takes a coroutine that writes its responses. The type stubs do not say so.
    return wrapped  # type: ignore[return-value]
