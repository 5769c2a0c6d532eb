#!/usr/bin/env bash
# The benchmark on a machine with a GPU and no network: Python 3.12 with torch and transformers is there, the rest travels as wheels.
#
#   bench/gpu.sh wheels    where there is a network: gather what the GPU machine lacks, in bench/wheels
#   bench/gpu.sh run       on the GPU machine: an environment over its own packages, a target grown to 8 B parameters, the bench
#
# Arguments after `run` go to `outrider bench`. Figures are written to $OUT, bench/out unless set.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-bench/out}

case "${1:-}" in
wheels)
  # Those of the interpreter there, not of this one; torch and transformers are there, with all that they need.
  python3 - <<'PY' > bench/wheels.txt
import tomllib
# xgrammar would bring torch along, so it comes alone below.
there = ("torch", "transformers", "safetensors", "tokenizers", "xgrammar")
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = [*project["dependencies"], "matplotlib>=3.9", "setuptools"]
print("\n".join(line for line in wanted if not line.startswith(there)))
PY
  fetch=(python3 -m pip download --quiet --dest bench/wheels --python-version 3.12 --implementation cp --only-binary :all:
    --platform manylinux_2_34_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64
    --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
  "${fetch[@]}" -r bench/wheels.txt
  "${fetch[@]}" --no-deps xgrammar apache-tvm-ffi
  # transformers has brought its numpy.
  rm bench/wheels/numpy-*.whl
  ;;
run)
  shift
  python3.12 -m venv --system-site-packages "$out/venv"
  "$out/venv/bin/pip" install --quiet --no-index --find-links bench/wheels --no-deps bench/wheels/*.whl
  "$out/venv/bin/pip" install --quiet --no-index --no-deps --no-build-isolation -e .
  # Hidden size, layers, heads, key/value heads and intermediate size of 8 B parameters.
  "$out/venv/bin/outrider" bench --only grown --grown-shape '[4096, 38, 48, 16, 14336]' --out "$out" \
    --batches '[1, 8, 32]' --rounds 2 --tokens 64 "$@"
  ;;
*)
  sed -n '2,8p' "$0"
  exit 2
  ;;
esac
