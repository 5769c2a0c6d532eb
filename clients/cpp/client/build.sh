#!/usr/bin/env bash
# Generates and builds with Debian's packages. Generated code is compiled without optimisation,
# which takes a third of the time.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p build/gen
python=${PYTHON:-../../../.venv/bin/python}
rpc=$("$python" -c 'import google.rpc; print(google.rpc.__path__[0].removesuffix("/google/rpc"))')
protos=(outrider/v1/{common,drafts,generation,verifier}.proto
  google/rpc/{status,error_details}.proto
  grpc/health/v1/health.proto grpc/reflection/v1/reflection.proto)
protoc -I ../../../protos -I "$rpc" -I /usr/share/grpc-proto \
  --cpp_out=build/gen --grpc_out=build/gen \
  --plugin=protoc-gen-grpc="$(command -v grpc_cpp_plugin)" "${protos[@]}"
exec make --silent --jobs=2
