"""gRPC server reflection in both versions that tools ask for.

The library serves v1alpha. v1 has the same messages under another package name, so the same
servicer answers it.
"""

from __future__ import annotations

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

_V1 = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: list[str]) -> None:
    """Let clients list and describe the services."""
    names = [*service_names, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    method = grpc.stream_stream_rpc_method_handler(
        ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_V1, {"ServerReflectionInfo": method}),)
    )
