#!/usr/bin/env bash
# Installs the packages of clients/*/*/packages.txt that are missing. Needs Debian and root.
set -euo pipefail
cd "$(dirname "$0")"
missing=$(
  cat */*/packages.txt | sort -u | while read -r name; do
    dpkg -s "$name" >/dev/null 2>&1 || echo "$name"
  done
)
[ -n "$missing" ] || exit 0
apt-get update -qq
# Each package is one argument.
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
