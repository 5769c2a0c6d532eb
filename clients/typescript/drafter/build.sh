#!/usr/bin/env bash
# Generates code from the protos into gen/, compiles into dist/, and runs the tests.
set -euo pipefail
cd "$(dirname "$0")"
[ -x node_modules/.bin/tsc ] || npm install --silent --no-audit --no-fund
# google.rpc comes with the Python package googleapis-common-protos, which Outrider itself needs.
rpc=$("${PYTHON:-../../../.venv/bin/python}" -c 'import google.rpc; print(google.rpc.__path__[0])')
mkdir -p gen/protos/google/rpc
cp "$rpc/error_details.proto" gen/protos/google/rpc
export PATH=$PWD/node_modules/.bin:$PATH
buf generate gen/protos
buf generate ../../../protos --path ../../../protos/outrider/v1
tsc
node dist/test/noise.js
node dist/test/sequence.js
