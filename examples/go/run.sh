#!/bin/bash
# Builds the client in Go and checks it: `make test-clients` runs this.
set -euo pipefail
cd "$(dirname "$0")/../.."

packages='golang golang-google-grpc-dev golang-google-protobuf-dev golang-github-golang-protobuf-1-5-dev
  protobuf-compiler protoc-gen-go protoc-gen-go-grpc'
# shellcheck disable=SC2086
if ! dpkg-query --show $packages > /dev/null 2>&1; then
  if [ "$(id -u)" != 0 ]; then
    echo "examples/go: packages are missing: apt-get install" $packages >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $packages > /dev/null
fi

build=$PWD/examples/go/build
module=$build/src/github.com/kvdock/kvdock
mkdir -p "$module/examples" "$build/cache"
ln -sfn "$PWD/examples/go" "$module/examples/go"
protoc --proto_path=proto --go_out="$build/src" --go-grpc_out="$build/src" proto/kvdock/v1/*.proto
export GO111MODULE=off GOPATH=$build:/usr/share/gocode GOCACHE=$build/cache
for command in check route; do
  go build -o "$build/$command" "github.com/kvdock/kvdock/examples/go/cmd/$command"
done
exec .venv/bin/python tests/clients/interop.py "$build/check"
