#!/usr/bin/env bash
# Generates outrider/v1 from the protos. Needs protoc, protoc-gen-go and protoc-gen-go-grpc:
# Debian's packages of these names, or `go install` of both plugins.
set -euo pipefail
cd "$(dirname "$0")"
protoc -I ../../protos --go_out=. --go_opt=module=outrider.dev/go \
  --go-grpc_out=. --go-grpc_opt=module=outrider.dev/go ../../protos/outrider/v1/*.proto
