#!/usr/bin/env bash
# Generates and builds every client, and compares the coupled noise of every language with its test
# vectors. Leaves what check.sh reads in clients/build: each client's seconds, and what each noise
# printed. Needs Node 20, cargo, and the packages that install.sh installs.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd .. && pwd)
export PYTHON=${PYTHON:-$root/.venv/bin/python}
export out=$PWD/build
rm -rf "$out"
mkdir "$out"

build() {
  local began=$SECONDS language=${1%%/*}
  [ ! -x "$1/build.sh" ] || "$1/build.sh" >"$out/$language.log" 2>&1 || { cat "$out/$language.log"; exit 1; }
  echo "$((SECONDS - began))" >"$out/$language.seconds"
}
export -f build
export SECONDS
printf '%s\n' */client | nice -n 5 xargs -P 2 -I{} bash -euc 'build {}'

# After the builds, since one of them installs what the noise of its language needs.
for noise in */noise; do
  nice -n 5 "$noise/run.sh" >"$out/${noise%%/*}.noise" 2>&1 || echo "failed" >>"$out/${noise%%/*}.noise"
done
