#!/usr/bin/env bash
# Builds the example with Debian's packages, which are in GOPATH.
# With Go modules, use `go build ./...`.
set -euo pipefail
cd "$(dirname "$0")"
module=build/src/outrider.dev/go
mkdir -p "$module"
protoc -I ../../protos --go_out=build/src --go-grpc_out=build/src ../../protos/outrider/v1/*.proto
for package in drafter noise examples; do ln -sfn "$PWD/$package" "$module/$package"; done
export GO111MODULE=off GOFLAGS= GOPATH=$PWD/build:/usr/share/gocode
export GOCACHE=${GOCACHE:-$HOME/.cache/go-build}
go vet outrider.dev/go/drafter outrider.dev/go/noise outrider.dev/go/examples/ngram
go build -o build/ngram outrider.dev/go/examples/ngram
