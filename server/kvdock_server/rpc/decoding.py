"""Messages that cannot be decoded: a mistake of who sent them, and said so, on every method alike.

gRPC itself would call it a fault of the server, with a traceback in the log for each. So what
decodes a request returns the refusal in the place of the message, and what is put around each
method's handler raises it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvdock_server.errors import RequestError, invalid
from kvdock_server.rpc.grpc_errors import Context, abort

logger = logging.getLogger(__name__)

Handler = Callable[[Any, Context], Any]


class DecodingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Puts itself around the handlers of all methods, those of libraries as well."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = await continuation(handler_call_details)
        if method is None:
            return None
        decode = _decode_or_refuse(method.request_deserializer, handler_call_details.method)
        encode = method.response_serializer
        if method.unary_unary:
            handler = _one_answer(method.unary_unary)
            return grpc.unary_unary_rpc_method_handler(handler, decode, encode)
        if method.stream_unary:
            handler = _one_answer(method.stream_unary)
            return grpc.stream_unary_rpc_method_handler(handler, decode, encode)
        if method.unary_stream:
            handler = _many_answers(method.unary_stream)
            return grpc.unary_stream_rpc_method_handler(handler, decode, encode)
        handler = _many_answers(method.stream_stream)
        return grpc.stream_stream_rpc_method_handler(handler, decode, encode)


def _decode_or_refuse(decode: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """Returns the message, or the RequestError that takes its place."""

    def decoded(message: bytes) -> Any:
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
                await answers  # and it has written them
        except RequestError as error:
            await abort(context, error)

    return answer


def _decoded(request: Any, context: Context) -> Any:
    """The request, or the stream of requests; RequestError in the place of one that is refused."""
    if hasattr(request, "__aiter__"):
        return _Requests(request, context)
    if isinstance(request, RequestError):
        logger.warning("%s: %s", context.peer(), request.message)
        raise request
    return request


class _Requests:
    """A stream of requests. No generator, which would end with a wait that is given up."""

    def __init__(self, requests: AsyncIterator[Any], context: Context) -> None:
        self._requests = aiter(requests)
        self._context = context

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return _decoded(await anext(self._requests), self._context)
