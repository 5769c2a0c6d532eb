#!/usr/bin/env bash
# Runs the benchmark on a machine with a GPU and no network. Its python3 is 3.12 and has torch and
# transformers.
#
#   bench/gpu.sh wheels    on a machine with a network: download the other packages to bench/wheels,
#                          which is copied to the GPU's machine with the tree
#   bench/gpu.sh run       on the GPU's machine: grow a target to 8 B parameters and measure it;
#                          arguments replace those of `outrider bench`
#
# Packages and checkpoint stay in bench/out for the next run. If $OUT is set, tables and figures are
# copied there.
set -euo pipefail
cd "$(dirname "$0")/.."

# The packages of the GPU's machine: torch, transformers, matplotlib and their dependencies. Our
# copies would hide them, and transformers does not start with a newer huggingface-hub. grpcio and
# protobuf are downloaded, because the generated code refuses versions older than its generator.
there="torch transformers huggingface-hub safetensors tokenizers numpy packaging pyyaml regex tqdm
  filelock fsspec jinja2 markupsafe setuptools networkx sympy mpmath triton anyio certifi click h11
  httpcore httpx idna hf-xet typer rich pygments markdown-it-py mdurl shellingham annotated-doc
  matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing python-dateutil six uvloop
  prometheus-client"

case "${1:-}" in
wheels)
  # xgrammar depends on torch, so it is downloaded without its dependencies.
  lines=$(python3 - $there xgrammar <<'PY'
import re, sys, tomllib
described = tomllib.load(open("pyproject.toml", "rb"))
project, build = described["project"], described["build-system"]["requires"]
wanted = [*build, *project["dependencies"], *project["optional-dependencies"]["models"]]
print(*(line for line in wanted if re.match(r"[\w-]+", line)[0] not in sys.argv), sep="\n")
PY
  )
  mapfile -t wanted <<< "$lines"
  # The wheels are for the interpreter of the GPU's machine.
  fetch=(python3 -m pip download --quiet --dest bench/wheels --python-version 3.12
    --implementation cp --only-binary :all:
    --platform manylinux_2_34_x86_64 --platform manylinux_2_31_x86_64
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
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
  # This makes no virtual environment. If python3 belongs to one already, a second one would see the
  # packages of the base interpreter, not those of the first.
  python3 -m pip install --quiet --no-index --no-deps --upgrade --target "$site" bench/wheels/*.whl
  # Do not wait for a network.
  export PYTHONPATH=$site:$PWD HF_HUB_OFFLINE=1
  # Build the CPU kernels and the compiled step; Triton needs a C compiler in any case. Remove the
  # libraries of an earlier tree first.
  rm -f ./*__mypyc*.so
  find outrider verifier_svc -name '*.so' -delete
  python3 setup.py --quiet build_ext --inplace --parallel 4 || echo "not compiled"
  if [ $# = 0 ]; then
    # A shape of 8 B parameters: hidden size, layers, heads, key/value heads, intermediate size. The
    # run should take ten minutes: half a minute to grow the target and two to load it twice. A step
    # takes about 30 ms in transformers and 10 ms in Outrider. A cell has 128 steps, or 256 at batch
    # 1 with its four requests, so the ways of each take about a minute. transformers' speculation
    # is measured at batch 1 alone.
    set -- --grown-shape '[4096, 36, 64, 16, 14336]' --batches '[1, 8, 32]' --rounds 2 --tokens 64
  fi
  python3 -m outrider_bench --only grown --out bench/out "$@"
  if [ -n "${OUT:-}" ]; then
    mkdir -p "$OUT"
    find bench/out -maxdepth 1 -name 'bench-*' -newer bench/out/started \
      -exec cp --target-directory "$OUT" {} +
  fi
  ;;
*)
  sed -n '2,11p' "$0"
  exit 2
  ;;
esac
