#!/usr/bin/env bash
# Generates and builds every client; the clients in Java and C++ only with --release. For each
# language it writes a file with the seconds of the build to clients/build, which check.sh reads.
# Needs Node 20 and the packages that install.sh installs.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd .. && pwd)
export PYTHON=${PYTHON:-$root/.venv/bin/python}
export out=$PWD/build
rm -rf "$out"
mkdir "$out"
languages=(go python ruby typescript)
[ "${1:-}" != --release ] || languages+=(cpp java)

build() {
  local began=$SECONDS script
  # Go's client is a package of the module that go/build.sh builds.
  for script in "$1/build.sh" "$1/client/build.sh"; do
    if [ -x "$script" ] && ! "$script" >"$out/$1.log" 2>&1; then
      cat "$out/$1.log"
      exit 1
    fi
  done
  echo "$((SECONDS - began))" >"$out/$1.seconds"
}
export -f build
export SECONDS
printf '%s\n' "${languages[@]}" | nice -n 5 xargs -P 2 -I{} bash -euc 'build {}'
