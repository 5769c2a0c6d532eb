#!/usr/bin/env bash
# Makes sure that a real redis-server is on this machine, from the system's own packages, and openssl, which makes the certificates of
# its TLS. The tests start it themselves; as a Sentinel too, which is the same binary.
set -euo pipefail
command -v redis-server >/dev/null && command -v openssl >/dev/null && exit 0
if command -v brew >/dev/null && brew install --quiet redis openssl; then exit 0; fi  # Homebrew refuses to run as root
as_root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "redis-server is missing and installing it needs root: install it, then run this again" >&2; exit 1; }
  as_root=(sudo)
fi
echo "installing redis-server, which the tests need"
if command -v apt-get >/dev/null; then
  "${as_root[@]}" apt-get update -qq && "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server openssl >/dev/null
elif command -v dnf >/dev/null; then
  "${as_root[@]}" dnf install -y -q redis openssl
elif command -v apk >/dev/null; then
  "${as_root[@]}" apk add -q redis openssl
fi
command -v redis-server >/dev/null || { echo "redis-server could not be installed: install it by hand, then run this again" >&2; exit 1; }
