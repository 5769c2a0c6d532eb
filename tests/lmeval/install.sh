#!/usr/bin/env bash
# Makes build/lm-eval, an environment with lm-evaluation-harness, which tests/lmeval runs. The
# environment takes 800 MB. If it already has the packages of requirements.txt, nothing is done.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/../.."
into=build/lm-eval
list=tests/lmeval/requirements.txt
cmp -s "$list" "$into/installed" && exit
"${PYTHON:-python3}" -m venv --clear "$into"
"$into/bin/python" -m pip install --quiet --disable-pip-version-check -r "$list"
cp "$list" "$into/installed"
