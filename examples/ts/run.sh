#!/bin/bash
# Builds the client in TypeScript and checks it: `make test-clients` runs this.
set -euo pipefail
cd "$(dirname "$0")/../.."

if ! command -v node npm > /dev/null; then
  if [ "$(id -u)" != 0 ]; then
    echo 'examples/ts: Node 20 and npm are missing: apt-get install nodejs npm' >&2
    exit 1
  fi
  apt-get update -qq
  apt-get install -qq --no-install-recommends nodejs npm > /dev/null
fi

example=$PWD/examples/ts
buf=$PWD/.venv/bin/buf
cd "$example"
# npm notes in this file what it has installed last.
if [ ! node_modules/.package-lock.json -nt package-lock.json ]; then
  npm ci --ignore-scripts --silent
fi
"$buf" generate ../../proto
npx tsc
cd ../..
exec .venv/bin/python tests/clients/interop.py node "$example/build/check/main.js"
