"""Runs a generator that is built into grpcio-tools as a plugin of buf.

    python tools/protoc_plugin.py python|grpc_python < CodeGeneratorRequest > CodeGeneratorResponse

buf finds protoc's own generators in a protoc. It does not find gRPC's, which is linked into
grpcio-tools.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf.compiler.plugin_pb2 import CodeGeneratorRequest, CodeGeneratorResponse
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet


def clear_json_names(message: DescriptorProto) -> None:
    """Clear the default JSON names, which buf fills in and protoc leaves out."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        clear_json_names(nested)


def generate(generator: str, request: CodeGeneratorRequest) -> CodeGeneratorResponse:
    """Runs one generator of grpcio-tools over the files of the request."""
    for file in request.proto_file:
        for message in file.message_type:
            clear_json_names(message)
    response = CodeGeneratorResponse(
        supported_features=CodeGeneratorResponse.FEATURE_PROTO3_OPTIONAL
    )
    with tempfile.TemporaryDirectory() as folder:
        descriptors = Path(folder, "descriptors.binpb")
        descriptors.write_bytes(FileDescriptorSet(file=request.proto_file).SerializeToString())
        out = Path(folder, "out")
        out.mkdir()
        subprocess.run(
            [
                sys.executable,
                "-m",
                "grpc_tools.protoc",
                f"--descriptor_set_in={descriptors}",
                f"--{generator}_out={out}",
                *request.file_to_generate,
            ],
            check=True,
        )
        for path in sorted(out.rglob("*.py")):
            response.file.add(name=path.relative_to(out).as_posix(), content=path.read_text())
    return response


if __name__ == "__main__":
    answer = generate(sys.argv[1], CodeGeneratorRequest.FromString(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(answer.SerializeToString())
