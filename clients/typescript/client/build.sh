#!/usr/bin/env bash
# Generates TypeScript from the protos of Outrider, of error details and of gRPC's own services.
set -euo pipefail
cd "$(dirname "$0")"
npm install --silent --no-audit --no-fund
# The Python package googleapis-common-protos, which Outrider needs, has google.rpc's protos.
rpc=$("${PYTHON:-../../../.venv/bin/python}" -c 'import google.rpc; print(google.rpc.__path__[0])')
mkdir -p build/protos/google/rpc
cp "$rpc/error_details.proto" build/protos/google/rpc
cp -r /usr/share/grpc-proto/grpc build/protos
export PATH=$PWD/node_modules/.bin:$PATH
buf generate build/protos --path build/protos/google \
  --path build/protos/grpc/health/v1 --path build/protos/grpc/reflection/v1
buf generate ../../../protos --path ../../../protos/outrider/v1
tsc
