#!/usr/bin/env bash
# Generates and builds the module with Debian's packages, which are in GOPATH. Where Go's module
# proxy can be reached, `./generate.sh && go mod tidy && go build ./...` does the same.
set -euo pipefail
cd "$(dirname "$0")"
./generate.sh
mkdir -p build/src/outrider.dev/go
for package in client drafter examples internal noise outrider; do
  ln -sfn "$PWD/$package" "build/src/outrider.dev/go/$package"
done
gocode=/usr/share/gocode
tags=
grep -q '^func NewClient(' "$gocode/src/google.golang.org/grpc/clientconn.go" || tags=grpc_before_1_63
export GO111MODULE=off GOFLAGS=-tags=$tags GOPATH=$PWD/build:$gocode
export GOCACHE=${GOCACHE:-$HOME/.cache/go-build}
packages=(client drafter examples/medusa examples/ngram noise)
go vet "${packages[@]/#/outrider.dev/go/}"
go test outrider.dev/go/drafter outrider.dev/go/noise
go build -o build/ngram outrider.dev/go/examples/ngram
go build -o build/medusa outrider.dev/go/examples/medusa
go build -o build/client outrider.dev/go/client
