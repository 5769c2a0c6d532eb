#!/bin/sh
# Generates code from the protos into gen/ and bundles the page into dist/.
# Run it as `npm run build`.
set -eu
cd "$(dirname "$0")"
rm -rf gen dist
# The Python package googleapis-common-protos, which Outrider needs, has google.rpc's error details.
rpc=$("${PYTHON:-../../.venv/bin/python}" -c 'import google.rpc; print(google.rpc.__path__[0])')
mkdir -p gen/protos/google/rpc
cp "$rpc/error_details.proto" gen/protos/google/rpc
buf generate gen/protos
buf generate ../../protos --path ../../protos/outrider/v1/generation.proto
tsc
esbuild index.ts --bundle --minify --outfile=dist/index.js --log-level=warning
cp index.html dist
