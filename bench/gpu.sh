#!/usr/bin/env bash
# The benchmark on a machine with a GPU and no network, whose python3 is a 3.12 that has torch and transformers.
#
#   bench/gpu.sh wheels    where there is a network: gather what else is needed in bench/wheels, to be carried there with the tree
#   bench/gpu.sh run       on that machine: a target grown to 8 B parameters, and the bench; arguments replace those of `outrider bench`
#
# Packages and checkpoint lie in bench/out, for the next run as well; tables and figures are copied to $OUT where that is set.
set -euo pipefail
cd "$(dirname "$0")/.."

# What a machine with torch and transformers has: they, what they need, and matplotlib's. Ours would hide it, and transformers would
# not start over a newer huggingface-hub. But grpcio and protobuf travel: the generated code refuses older ones than made it.
there="torch transformers huggingface-hub safetensors tokenizers numpy packaging pyyaml regex tqdm filelock fsspec jinja2 markupsafe
  setuptools networkx sympy mpmath triton anyio certifi click h11 httpcore httpx idna hf-xet typer rich pygments markdown-it-py mdurl
  shellingham annotated-doc matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing python-dateutil six uvloop
  prometheus-client"

case "${1:-}" in
wheels)
  # xgrammar would bring torch along, so it comes alone.
  lines=$(python3 - $there xgrammar <<'PY'
import re, sys, tomllib
described = tomllib.load(open("pyproject.toml", "rb"))
project, build = described["project"], described["build-system"]["requires"]
wanted = [*build, *project["dependencies"], *project["optional-dependencies"]["models"]]
print(*(line for line in wanted if re.match(r"[\w-]+", line)[0] not in sys.argv), sep="\n")
PY
  )
  mapfile -t wanted <<< "$lines"
  # Those of the interpreter there, not of this one.
  fetch=(python3 -m pip download --quiet --dest bench/wheels --python-version 3.12 --implementation cp --only-binary :all:
    --platform manylinux_2_34_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64
    --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
  rm -rf bench/wheels
  "${fetch[@]}" "${wanted[@]}"
  "${fetch[@]}" --no-deps xgrammar apache-tvm-ffi
  for name in $there; do
    rm -f bench/wheels/"${name//-/_}"-*.whl
  done
  du --human-readable --apparent-size bench/wheels
  ;;
run)
  shift
  site=$PWD/bench/out/site
  mkdir -p bench/out
  touch bench/out/started
  # No virtual environment: where python3 is one's, another over it would see the packages of what that was made from, not its own.
  python3 -m pip install --quiet --no-index --no-deps --upgrade --target "$site" bench/wheels/*.whl
  # Nothing shall wait for a network.
  export PYTHONPATH=$site:$PWD HF_HUB_OFFLINE=1
  # What makes CPUs fast, and the engine's step; a C compiler is needed for Triton in any case. Nothing of an earlier tree may stay.
  rm -f ./*__mypyc*.so
  find outrider verifier_svc -name '*.so' -delete
  python3 setup.py --quiet build_ext --inplace --parallel 4 || echo "not compiled"
  if [ $# = 0 ]; then
    # A shape of 8 B parameters: hidden size, layers, heads, key/value heads, intermediate size. Meant for ten minutes in all: half a
    # minute to grow, two to load it twice, and for a guess of 30 ms a step in transformers and 10 in ours, at 128 steps a cell or, where
    # four requests follow each other at batch 1, 256, a minute for transformers' ways and as long for ours. What is slow in batches,
    # transformers' speculation, is measured at batch 1 alone as it is.
    python3 -m outrider_bench --only judging --out bench/out
    set -- --grown-shape '[4096, 36, 64, 16, 14336]' --batches '[1, 8, 32]' --rounds 2 --tokens 64
  fi
  python3 -m outrider_bench --only grown --out bench/out "$@"
  if [ -n "${OUT:-}" ]; then
    mkdir -p "$OUT"
    find bench/out -maxdepth 1 -name 'bench-*' -newer bench/out/started -exec cp --target-directory "$OUT" {} +
  fi
  ;;
*)
  sed -n '2,7p' "$0"
  exit 2
  ;;
esac
