#!/bin/bash
# Builds the client in C++ and checks it: `make test-clients` runs this.
set -euo pipefail
cd "$(dirname "$0")/../.."

packages='g++ make pkg-config protobuf-compiler protobuf-compiler-grpc libgrpc++-dev libprotobuf-dev libssl-dev'
# shellcheck disable=SC2086
missing=$(for package in $packages; do
  dpkg -s "$package" > /dev/null 2>&1 || echo "$package"; done | tr '\n' ' ')
if [ -n "$missing" ]; then
  if [ "$(id -u)" != 0 ]; then
    echo "examples/cpp: packages are missing: apt-get install $missing" >&2
    exit 1
  fi
  apt-get update -qq
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $missing > /dev/null
fi

make --silent --jobs=2 --directory examples/cpp
exec .venv/bin/python tests/clients/interop.py "$PWD/examples/cpp/build/client"
