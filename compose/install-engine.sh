#!/usr/bin/env bash
# Installs Docker, Compose, debootstrap, iptables and ip if they are missing, from Debian's or
# Ubuntu's own packages.
set -euo pipefail
missing=()
command -v dockerd >/dev/null || missing+=(docker.io)
docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null ||
  missing+=(docker-compose)
command -v debootstrap >/dev/null || missing+=(debootstrap)
command -v iptables >/dev/null || missing+=(iptables)
command -v ip >/dev/null || missing+=(iproute2)
[ ${#missing[@]} -gt 0 ] || exit 0
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
echo "installing ${missing[*]} for the check of the containers"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
