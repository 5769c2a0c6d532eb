#!/usr/bin/env bash
# Writes outrider/v1 from the protos. Usage: protos/generate.sh [OUT_DIR]; run from anywhere, with the virtual environment's python.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root}
python=${PYTHON:-$root/.venv/bin/python}
PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc -I "$root/protos" \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
  "$root"/protos/outrider/v1/*.proto
