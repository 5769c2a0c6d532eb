#!/usr/bin/env bash
# Measures on a machine with a GPU and no network, in steps that take at most ten minutes each. Its
# python3 is 3.12 and has torch, transformers, triton, pytest and hypothesis. Without a GPU, each
# step runs in small on the CPU.
#
#   bench/gpu.sh first     tests, steps, a head and a draft model in the verifier's process: 9 minutes
#   bench/gpu.sh second    n-grams at 32 sequences, a draft model beside the verifier: 5 minutes
#
# Both run parts of the steps below, and end with what their figures decide.
#
#   bench/gpu.sh test      the tests of GPU code; arguments go to pytest
#   bench/gpu.sh steps     forwards of an 8 B target and a 1 B draft model with random weights
#   bench/gpu.sh grow      an 8 B target, a 1 B draft model and a head; stack makes missing ones
#   bench/gpu.sh stack     the real stack: plain, a head, a draft model, n-grams; needs wheels.
#                          USE='[head], [inside]' and BATCH='1, 8' choose cells, MPS=1 lets
#                          processes share the card, and PART names the files of results
#   bench/gpu.sh tenants   small requests beside a tenant that floods, real stack; needs wheels
#   bench/gpu.sh tables    a table of the figures of steps; runs after steps as well
#   bench/gpu.sh decisions what the figures of stack decide, beside their predictions
#   bench/gpu.sh wheels    with a network: download the packages that stack needs to bench/wheels, and
#                          compile the engine's step and the kernels if a python3.12 is there
#   bench/gpu.sh pack      print the size of what goes to the GPU's machine; fails above 63 MiB.
#                          models/smollm2 stays behind: move it away first
#
# The figures of steps are lines of JSON in $OUT/lines.jsonl (bench/out/gpu by default), each on the
# disk before the next is measured; tables.md and figures.csv are made of them.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-bench/out/gpu}
mkdir -p "$OUT" bench/out
export PYTHONPATH=$PWD HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

# The packages of the GPU's machine: torch, transformers, matplotlib and others. Our copies would
# hide them, and transformers does not start with a newer huggingface-hub. protobuf is downloaded,
# because the generated code refuses versions older than its generator.
there="torch transformers huggingface-hub safetensors tokenizers numpy packaging pyyaml regex tqdm
  filelock fsspec jinja2 markupsafe setuptools networkx sympy mpmath triton anyio certifi click h11
  httpcore httpx idna hf-xet typer rich pygments markdown-it-py mdurl shellingham annotated-doc
  matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing python-dateutil six uvloop
  prometheus-client psutil wrapt msgpack attrs typing-extensions"

step=${1:-}
shift || true

# Installs the packages that this machine lacks, once.
install_wheels() {
  compgen -G "bench/wheels/*.whl" > /dev/null || return 0
  # The packages go into a folder, not into a virtual environment. If python3 already runs in a
  # virtual environment, a second environment would see the packages of the base interpreter, but
  # not the packages of the first environment.
  local site=$PWD/bench/out/site
  [ -d "$site" ] || python3 -m pip install --quiet --no-index --no-deps --no-compile \
    --target "$site" bench/wheels/*.whl
  export PYTHONPATH=$site:$PWD
}

# Prints the name of the archive for libraries compiled from today's sources. The name has a hash of
# the sources, so that a library never runs beside other sources than its own.
compiled() {
  local hash
  hash=$(find outrider verifier_svc setup.py -name '*.py' -print0 -o -name '*.[ch]' -print0 |
    LC_ALL=C sort -z | xargs -0 cat | sha256sum)
  echo "bench/wheels/compiled-${hash:0:16}.tgz"
}

# Provides the kernels for the drafter on the host's CPU: unpacks the libraries that `wheels`
# compiled from today's sources (the engine's step is one of them), or else builds the kernels. The
# build makes one library after the other, because they share object files.
build_kernels() {
  # Python prefers a library to the sources beside it, even if the sources are newer.
  local list=bench/out/compiled.list archive
  archive=$(compiled)
  [ "$(head -n 1 "$list" 2> /dev/null)" != "$archive" ] || return 0
  [ ! -f "$list" ] || tail -n +2 "$list" | xargs rm -f
  rm -f "$list"
  if [ -f "$archive" ] && python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
    tar -xzf "$archive"
    { echo "$archive" && tar -tzf "$archive" | grep '\.so$'; } > "$list"
    return
  fi
  echo "the engine's step is not compiled: bench/wheels has no libraries for these sources"
  compgen -G "outrider/lm/cpu/*.so" > /dev/null ||
    python3 setup.py --quiet build --build-base bench/out/build --build-lib bench/out/lib
  [ ! -d bench/out/lib ] || cp bench/out/lib/outrider/lm/cpu/*.so outrider/lm/cpu/
}

# Compiles the engine's step and the kernels into bench/wheels. The GPU's machine has no compiler
# for the step, and time on that machine is expensive.
compile() {
  local work=bench/out/compiled
  rm -rf "$work"
  python3.12 -m venv "$work/env"
  "$work/env/bin/pip" install --quiet "setuptools>=77" "mypy>=2.4"
  "$work/env/bin/python" setup.py --quiet build_ext --build-temp "$work/tmp" --build-lib "$work/lib"
  if ! compgen -G "$work/lib/verifier_svc/engine/loop.*.so" > /dev/null; then
    echo "the engine's step was not compiled: see above"
    return 1
  fi
  find "$work/lib" -name '*.so' -exec strip {} +
  tar -czf "$(compiled)" -C "$work/lib" .
}

# Writes bench/out/grown/head, and bench/out/grown/{target,draft} if they are missing. With a GPU,
# target and draft model have the shapes of Llama-3.1-8B and Llama-3.2-1B; without a GPU, small
# shapes. All three compute what the bundled models compute.
grow() {
  python3 - <<'PY'
from pathlib import Path
import torch
from outrider_bench.grow import Shape, grow_head, make_checkpoint

out, models = Path("bench/out/grown"), Path("models")
if torch.cuda.is_available():
    shapes = Shape(4096, 32, 64, 16, 14336, 128256), Shape(2048, 16, 32, 8, 8192, 128256)
else:
    shapes = (Shape(384, 7, 6, 2, 1152, 8192),) * 2
for name, shape in zip(("target", "draft"), shapes, strict=True):
    if not (out / name).is_dir():
        make_checkpoint(models / name, out / name, shape, "bfloat16")
grow_head(models / "heads/eagle3", models / "target", out / "target", out / "head")
PY
}

# Runs or reports an experiment. The sources are not installed, so `outrider lab` is missing.
experiment() {
  python3 -c 'import sys
from importlib import import_module
sys.exit(import_module(f"outrider_bench.commands.{sys.argv[1]}").main(sys.argv[2:]))' "$@"
}

case "$step" in
first)
  nvidia-smi || true
  # The tests must not import libraries that `grow` is unpacking.
  [ ! -f "$(compiled)" ] || build_kernels
  # If one part fails or takes too long, the next parts still run.
  "$0" grow > "$OUT/grow.txt" 2>&1 &
  timeout 80 "$0" test -k "on_a_gpu or split_into_parts or bits_of_torchs" || true
  wait
  "$0" steps --short --seconds 100 || true
  PART=first USE='[head], [inside]' BATCH='1, 8' MOST_SECONDS=200 "$0" stack
  python3 -m outrider_bench.gpu decisions "$OUT"
  exit
  ;;
second)
  PART=second USE='[ngram], [inside]' BATCH='32' MOST_SECONDS=120 "$0" stack
  PART=shared MPS=1 USE='[beside]' BATCH='1, 8' MOST_SECONDS=130 "$0" stack
  python3 -m outrider_bench.gpu decisions "$OUT"
  exit
  ;;
test | steps | stack | tenants) install_wheels ;;&
test)
  echo "test: estimated 4 minutes on a GPU"
  mapfile -t files < <(grep -l cuda tests/lm/test_*.py)
  files+=(tests/shared/test_{sampling,logit_processing,coupling}.py)
  # pytest-asyncio is not there, and its options in pyproject.toml would be errors.
  python3 -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -q -m "not slow" \
    -o "markers=slow: left out" "${files[@]}" "$@" 2>&1 | tee "$OUT/tests.txt"
  ;;
steps)
  python3 -m outrider_bench.gpu steps "$OUT" "$@"
  python3 -m outrider_bench.gpu tables "$OUT"
  ;;
stack)
  echo "$step: estimated 9 minutes on a GPU, one of them to grow the models"
  build_kernels
  grow
  name=$step${PART:+-$PART}
  file=$OUT/$name.yaml
  cp "bench/experiments/gpu-$step.yaml" "$file"
  [ -z "${USE:-}" ] || sed -i "s/^  use: .*/  use: [$USE]/" "$file"
  [ -z "${BATCH:-}" ] || sed -i "s/^  workload.batch: .*/  workload.batch: [$BATCH]/" "$file"
  stop_sharing() { :; }
  if [ -n "${MPS:-}" ]; then
    export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    if nvidia-cuda-mps-control -d; then
      # Otherwise the daemon would go on after this script has ended.
      stop_sharing() { echo quit | nvidia-cuda-mps-control; }
    else
      echo "$step: there is no MPS, so the processes get the card in turns"
    fi
  fi
  if ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    sed -i 's/batch: .*/batch: [1]/; s/repetitions: .*/repetitions: 1/' "$file"
  fi
  runs=$OUT/runs
  mkdir -p "$runs"
  keep() { tar -czf "$OUT/runs.part" -C "$runs" . && mv "$OUT/runs.part" "$OUT/runs.tgz"; }
  # A step that is killed loses only what it wrote in its last ten seconds.
  (while sleep 10; do keep || true; done) > /dev/null 2>&1 &
  keeper=$!
  trap 'kill "$keeper" || true; keep || true; stop_sharing' EXIT
  export -f experiment
  timeout --signal=INT "${MOST_SECONDS:-480}" bash -c 'experiment "$@"' - \
    run "$file" --out "$runs" "$@" || echo "$step: ended with status $?"
  run=$(find "$runs" -name run.json -printf '%T@ %h\n' | sort -n | tail -n 1 | cut -d ' ' -f 2)
  experiment report "$run" | tee "$OUT/$name.txt"
  cp "$run/report/figures.csv" "$OUT/$name.csv"
  ;;
grow)
  build_kernels
  grow
  ;;
tenants)
  echo "$step: estimated 3 minutes"
  build_kernels
  log=$OUT/tenants.log
  python3 -m outrider_cli.main serve models/target --drafter ngram \
    --drafter model=models/draft --http-port 8123 > "$log" 2>&1 &
  trap 'kill %1; wait' EXIT
  python3 bench/traffic/play.py --port 8123 bench/traffic/{alone,burst,prompts,unread,choices}.jsonl \
    bench/traffic/alone.jsonl | tee "$OUT/tenants.txt" || tail -n 50 "$log"
  ;;
tables | decisions)
  python3 -m outrider_bench.gpu "$step" "$OUT"
  ;;
wheels)
  lines=$(python3 - $there <<'PY'
import re, sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = [*project["dependencies"], *project["optional-dependencies"]["models"]]
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
  # The stack runs without TLS, and calls no Connect service.
  for name in $there cryptography pyqwest; do
    rm -f bench/wheels/"${name//-/_}"-*.whl
  done
  if python3.12 -c '' 2> /dev/null; then
    compile
  else
    echo "the engine's step stays uncompiled: there is no python3.12 to compile it for"
  fi
  exec "$0" pack
  ;;
pack)
  {
    git ls-files -z --cached --others --exclude-standard ':!models/smollm2'
    find bench -path 'bench/wheels/*' -type f -print0
  } | xargs -0 du --apparent-size --block-size=1 | awk -F '[\t/]' '
    { of = $2 == "bench" && $3 == "wheels" ? "bench/wheels" : $2; size[of] += $1; all += $1 }
    END {
      for (of in size) printf "%6.2f MiB %s\n", size[of] / 2^20, of
      printf "%6.2f MiB in all, of 63\n", all / 2^20
      exit all > 63 * 2^20
    }' | sort -n | tail -n 12
  ;;
*)
  sed -n '2,26p' "$0"
  exit 2
  ;;
esac
