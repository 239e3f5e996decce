"""Answers messages that cannot be decoded with INVALID_ARGUMENT, on every method, and larger ones
than the protocol allows with RESOURCE_EXHAUSTED.

gRPC itself would answer that the server failed, and log a traceback for each message. So the
decoder returns a RequestError in the place of the message, and a wrapper around each method's
handler raises the error.

The wrapper also ends calls whose client is gone, for which gRPC would log a traceback, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from kvdock_server.errors import Reason, RequestError, invalid
from kvdock_server.rpc.grpc_errors import Context, abort

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 << 20
"""The protocol's limit."""
MOST_SEEN_BYTES = 32 << 20
"""gRPC itself refuses a larger message, and ends the whole stream."""

# Of a message that is too large: room for the first field of a session's request.
_BEGIN_BYTES = 16

Handler = Callable[[Any, Context], Any]


class MessageTooLargeError(RequestError):
    """A message of more bytes than the protocol allows, which is not looked at but for its begin.

    Whoever reads a stream of requests may go on after it.
    """

    def __init__(self, message: bytes, method: str) -> None:
        super().__init__(
            Reason.MESSAGE_TOO_LARGE,
            f"a message of {len(message)} bytes to {method}: at most {MAX_MESSAGE_BYTES}; split "
            "the call",
            limit=MAX_MESSAGE_BYTES,
        )
        self.begin = message[:_BEGIN_BYTES]


class DecodingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps the handlers of all methods, also of the services that come from libraries."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = await continuation(handler_call_details)
        if method is None:
            return None
        decode = _decode_or_refuse(method.request_deserializer, handler_call_details.method)
        for kind, wrap, make_handler in _KINDS:
            if handler := getattr(method, kind):
                return make_handler(wrap(handler), decode, method.response_serializer)
        raise AssertionError(f"{handler_call_details.method} has no handler")


def _decode_or_refuse(decode: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """A decoder that returns the message, or in its place the RequestError to answer with."""

    def decoded(message: bytes) -> Any:
        if len(message) > MAX_MESSAGE_BYTES:
            return MessageTooLargeError(message, method)
        try:
            return decode(message)
        except DecodeError as error:
            return invalid(
                f"a message of {len(message)} bytes to {method} cannot be decoded ({error}): is it "
                "of this method, and of this version of the protocol?"
            )

    return decoded


def _one_answer(handler: Handler) -> Handler:
    async def answer(request: Any, context: Context) -> Any:
        try:
            return await handler(_decoded(request, context), context)
        except RequestError as error:
            await abort(context, error)
        except grpc.aio.InternalError as error:
            _end_without_client(context, error)

    return answer


def _many_answers(handler: Handler) -> Handler:
    async def answer(request: Any, context: Context) -> None:
        try:
            answers = handler(_decoded(request, context), context)
            if inspect.isasyncgen(answers):
                async with contextlib.aclosing(answers):
                    async for each in answers:
                        await context.write(each)
            else:
                await answers  # a coroutine, which writes them itself
        except RequestError as error:
            await abort(context, error)
        except grpc.aio.InternalError as error:
            _end_without_client(context, error)

    return answer


def _end_without_client(context: Context, error: Exception) -> NoReturn:
    """Ends a call on which gRPC can send and read no more, mostly since its client went away."""
    logger.info("%s: a call was given up: %r", context.peer(), error)
    raise asyncio.CancelledError from error


def _decoded(request: Any, context: Context) -> Any:
    """The request, or the stream of requests. Raises a RequestError that stands for a request."""
    if hasattr(request, "__aiter__"):
        return _Requests(request, context)
    if isinstance(request, RequestError):
        logger.warning("%s: %s", context.peer(), request.message)
        raise request
    return request


class _Requests:
    """A stream of requests.

    This is no generator: a generator would end when the wait for its next request is cancelled, and
    after an error.
    """

    def __init__(self, requests: AsyncIterator[Any], context: Context) -> None:
        self._requests = aiter(requests)
        self._context = context

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return _decoded(await anext(self._requests), self._context)


_KINDS: tuple[tuple[str, Callable[[Handler], Handler], Callable[..., Any]], ...] = (
    ("unary_unary", _one_answer, grpc.unary_unary_rpc_method_handler),
    ("stream_unary", _one_answer, grpc.stream_unary_rpc_method_handler),
    ("unary_stream", _many_answers, grpc.unary_stream_rpc_method_handler),
    ("stream_stream", _many_answers, grpc.stream_stream_rpc_method_handler),
)
