#!/usr/bin/env bash
# Installs the packages of clients/*/*/packages.txt that are missing; the packages for Java and C++
# only with --release. Needs Debian and root.
set -euo pipefail
cd "$(dirname "$0")"
lists=(*/client/packages.txt)
[ "${1:-}" = --release ] || lists=({go,ruby,typescript}/client/packages.txt)
missing=$(
  cat "${lists[@]}" | sort -u | while read -r name; do
    dpkg -s "$name" >/dev/null 2>&1 || echo "$name"
  done
)
[ -n "$missing" ] || exit 0
apt-get update -qq
# Each package is one argument.
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
