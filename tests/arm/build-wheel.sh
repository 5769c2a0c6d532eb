#!/usr/bin/env bash
# Builds Outrider's wheel for linux_aarch64 into a folder, with gcc-aarch64-linux-gnu, on a machine
# that is not ARM. build/arm64 (make-root.sh) has the headers and the settings of ARM's Python. The
# version of that Python must be the version of PYTHON, such as 3.11.
set -euo pipefail
into=$(mkdir -p "${1:?usage: $0 FOLDER}" && realpath "$1")
cd "$(dirname "$(realpath "$0")")/../.."
usr=$PWD/build/arm64/root/usr
command -v aarch64-linux-gnu-gcc >/dev/null || {
  echo "this needs aarch64-linux-gnu-gcc; on Debian: apt-get install gcc-aarch64-linux-gnu" >&2
  exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The builder is an environment of this machine. pip would look for ARM's files of the requirements
# if it made the environment itself.
"${PYTHON:-python3}" -m venv "$work/builder"
quietly() { "$work/builder/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }
quietly install --require-hashes -r compose/pinned/build.txt

# A copy of the sources, in which a build may leave its output.
mkdir "$work/sources" "$work/settings"
git ls-files -- ':!models' ':!tests' ':!bench' | tar -cf - -T - | tar -xf - -C "$work/sources"
settings=_sysconfigdata__aarch64-linux-gnu
cp "$usr"/lib/python3*/$settings.py "$work/settings"
export _PYTHON_HOST_PLATFORM=linux-aarch64 _PYTHON_SYSCONFIGDATA_NAME=$settings
export PYTHONPATH=$work/settings CC=aarch64-linux-gnu-gcc
export LDSHARED="$CC -shared" CFLAGS="-I$(echo "$usr"/include/python3*) -idirafter $usr/include"
cd "$work/sources"
quietly wheel --no-deps --no-build-isolation --no-index --wheel-dir "$into" .
