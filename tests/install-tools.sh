#!/usr/bin/env bash
# Makes sure that the programs which the tests start are on this machine, from the system's own packages: redis-server (as a Sentinel
# too, which is the same binary), openssl for its certificates, Chromium for the page, Prometheus for the dashboard's queries.
set -euo pipefail
missing() {
  local found=()
  for program in redis-server openssl prometheus; do command -v "$program" >/dev/null || found+=("$program"); done
  command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || found+=(chromium)
  echo "${found[@]}"
}
[ -z "$(missing)" ] && exit 0
echo "installing what the tests need: $(missing)"
as_root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "this needs root: install $(missing), then run this again" >&2; exit 1; }
  as_root=(sudo)
fi
if command -v apt-get >/dev/null; then
  # Nothing is to run that the tests did not start; a package's own service would take its port.
  blocked=$(mktemp)
  printf '#!/bin/sh\nexit 101\n' >"$blocked"
  chmod 755 "$blocked"
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    "${as_root[@]}" cp "$blocked" /usr/sbin/policy-rc.d
    trap '"${as_root[@]}" rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    redis-server openssl prometheus chromium fonts-dejavu-core >/dev/null
elif command -v dnf >/dev/null; then
  "${as_root[@]}" dnf install -y -q redis openssl golang-github-prometheus chromium
elif command -v apk >/dev/null; then
  "${as_root[@]}" apk add -q redis openssl prometheus chromium
fi
[ -z "$(missing)" ] || { echo "could not be installed: $(missing); install them by hand, then run this again" >&2; exit 1; }
