#!/usr/bin/env bash
# Generates outrider/v1 and outrider/internal/v1 from the protos, with the virtual environment's
# python. Runs from any directory. Usage: protos/generate.sh [OUT_DIR]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root}
python=${PYTHON:-$root/.venv/bin/python}
export PATH="$(dirname "$python"):$PATH"
cd "$root/protos"
mkdir -p "$out"
files=(outrider/v1/*.proto outrider/internal/v1/*.proto)
protoc=("$python" -m grpc_tools.protoc -I .)
"${protoc[@]}" --python_out="$out" --mypy_out="quiet:$out" "${files[@]}"
# Only files with a service have gRPC stubs.
mapfile -t services < <(grep -l '^service ' "${files[@]}")
"${protoc[@]}" --grpc_python_out="$out" --mypy_grpc_out="quiet:$out" "${services[@]}"
