#!/usr/bin/env bash
# Installs the programs that the tests start and that are missing, from the system's own packages:
# redis-server, openssl for its certificates, Chromium for the pages, npm to build the page of
# clients/browser, Prometheus for the dashboard's queries, Ruby with gRPC for the drafter of
# docs/drafters.md, and a compiler and QEMU for the kernels of ARM processors.
set -euo pipefail
missing() {
  local found=()
  local programs="redis-server openssl prometheus npm"
  # A walk-through of docs/drafters.md installs Debian's packages, and the tests of kernels compile
  # with Debian's compiler.
  command -v apt-get >/dev/null && programs="$programs grpc_tools_ruby_protoc protoc"
  command -v apt-get >/dev/null && [ "$(uname -m)" = x86_64 ] &&
    programs="$programs aarch64-linux-gnu-gcc qemu-aarch64"
  for program in $programs; do command -v "$program" >/dev/null || found+=("$program"); done
  command -v chromium >/dev/null || command -v chromium-browser >/dev/null ||
    command -v google-chrome >/dev/null || found+=(chromium)
  echo "${found[@]}"
}
# The JSON-Schema-Test-Suite is only in the source package of jsonschema. We take it from
# the source package of the version that pyproject.toml's packages brought.
suite=build/json-schema-suite
if [ ! -d "$suite" ] && [ -x .venv/bin/jsonschema ]; then
  fetched=$(mktemp -d)
  version=$(.venv/bin/python -c "from importlib.metadata import version; print(version('jsonschema'))")
  if .venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
    --no-binary jsonschema -d "$fetched" "jsonschema==$version" &&
    tar -xzf "$fetched"/jsonschema-*.tar.gz -C "$fetched"; then
    mkdir -p build
    mv "$fetched/jsonschema-$version/json" "$suite"
  else
    echo "the JSON-Schema-Test-Suite could not be downloaded; its test will be skipped" >&2
  fi
  rm -rf "$fetched"
fi
[ -z "$(missing)" ] && exit 0
echo "installing what the tests need: $(missing)"
as_root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || {
    echo "this needs root: install $(missing), then run this again" >&2
    exit 1
  }
  as_root=(sudo)
fi
if command -v apt-get >/dev/null; then
  # Keep packages from starting their services: only the tests start servers, and a service would
  # take a port.
  blocked=$(mktemp)
  printf '#!/bin/sh\nexit 101\n' >"$blocked"
  chmod 755 "$blocked"
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    "${as_root[@]}" cp "$blocked" /usr/sbin/policy-rc.d
    trap '"${as_root[@]}" rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  "${as_root[@]}" apt-get update -qq
  # Install only missing packages: Debian's npm, for example, cannot be installed beside another
  # source's Node.js.
  packages=()
  for program in $(missing); do
    case $program in
      chromium) packages+=(chromium fonts-dejavu-core) ;;
      grpc_tools_ruby_protoc) packages+=(ruby ruby-grpc ruby-grpc-tools) ;;
      protoc) packages+=(protobuf-compiler libprotobuf-dev) ;;
      aarch64-linux-gnu-gcc) packages+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross) ;;
      qemu-aarch64) packages+=(qemu-user) ;;
      *) packages+=("$program") ;;
    esac
  done
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
elif command -v dnf >/dev/null; then
  "${as_root[@]}" dnf install -y -q redis openssl golang-github-prometheus npm chromium
elif command -v apk >/dev/null; then
  "${as_root[@]}" apk add -q redis openssl prometheus npm chromium
fi
[ -z "$(missing)" ] || {
  echo "could not be installed: $(missing); install them by hand, then run this again" >&2
  exit 1
}
