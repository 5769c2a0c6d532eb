#!/usr/bin/env bash
# Generates Ruby from Outrider's protos, and from those gRPC services that have no Ruby package.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p build
generate=(grpc_tools_ruby_protoc -I /usr/include --ruby_out=build --grpc_out=build)
"${generate[@]}" -I ../../../protos ../../../protos/outrider/v1/*.proto
cd build
grpc_tools_ruby_protoc -I /usr/share/grpc-proto --ruby_out=. --grpc_out=. \
  grpc/health/v1/health.proto grpc/reflection/v1/reflection.proto
