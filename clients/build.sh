#!/usr/bin/env bash
# Generates and builds every client, and compares the coupled noise of every language with its test
# vectors. Writes two files for each language to clients/build, which check.sh reads: the seconds of
# the client's build, and the output of the noise. Needs Node 20, cargo, and the packages that
# install.sh installs.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd .. && pwd)
export PYTHON=${PYTHON:-$root/.venv/bin/python}
export out=$PWD/build
rm -rf "$out"
mkdir "$out"

build() {
  local began=$SECONDS language=${1%%/*}
  if [ -x "$1/build.sh" ] && ! "$1/build.sh" >"$out/$language.log" 2>&1; then
    cat "$out/$language.log"
    exit 1
  fi
  echo "$((SECONDS - began))" >"$out/$language.seconds"
}
export -f build
export SECONDS
printf '%s\n' */client | nice -n 5 xargs -P 2 -I{} bash -euc 'build {}'

# After the builds: the noise in TypeScript needs packages that the build of its client installs.
for noise in */noise; do
  said=$out/${noise%%/*}.noise
  nice -n 5 "$noise/run.sh" >"$said" 2>&1 || echo "failed" >>"$said"
done
