#!/usr/bin/env bash
# Generates and builds with Debian's packages, which are in GOPATH. With Go modules, use
# `go get google.golang.org/grpc` instead.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p build/src
protoc -I ../../../protos --go_out=build/src --go-grpc_out=build/src \
  ../../../protos/outrider/v1/*.proto
export GO111MODULE=off GOFLAGS= GOPATH=$PWD/build:/usr/share/gocode
export GOCACHE=${GOCACHE:-$HOME/.cache/go-build}
go build -o build/client client.go
