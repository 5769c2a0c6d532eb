#!/usr/bin/env bash
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$here/../../..
exec "${PYTHON:-$here/../../../.venv/bin/python}" "$here/client.py" "$@"
