#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")"
cargo run --quiet --offline --target-dir build -- ../../../protos/coupled_noise.json
