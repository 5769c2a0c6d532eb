#!/usr/bin/env bash
# Generates, builds and runs every client against a real stack without TLS and, except for Java,
# against one with mutual TLS; each must pass nine checks. The clients in Java and C++ run only with
# --release. Needs Node 20, and Debian with root or with the packages of
# clients/*/client/packages.txt installed. With --built, it takes what install.sh and build.sh have
# made.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd .. && pwd)
export PYTHON=${PYTHON:-$root/.venv/bin/python}
work=$(mktemp -d)
servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true; wait; rm -rf "$work"' EXIT

[ "${1:-}" = --built ] || ./install.sh "$@"

# These ports are below the range 20000 to 31999, from which tests that run beside this script
# choose: a test could take a port of that range before the stack listens on it.
next=19000
port() { printf -v "$1" '%s' $((next++)); }
cd "$root"
certs=$work/certs
"$PYTHON" -m outrider_cli.main certs "$certs" >/dev/null
declare -A gateway verifier lonely
# start NAME FLAG...: starts a stack, and a gateway without a verifier for the check "unavailable".
start() {
  local public=() http lonely_http
  port "gateway[$1]" && port "verifier[$1]" && port "lonely[$1]" && port http && port lonely_http
  "$PYTHON" -m outrider_cli.main serve --target models/target --drafter ngram --dtype float32 \
    --http-port "$http" --grpc-port "${gateway[$1]}" --verifier-port "${verifier[$1]}" "${@:2}" \
    >"$work/serve-$1.log" 2>&1 &
  servers+=($!)
  if [ "$1" != plain ]; then
    public=(--public-tls-cert "$certs/gateway.pem" --public-tls-key "$certs/gateway.key")
  fi
  "$PYTHON" -m gateway --verifier 127.0.0.1:1 --tokenizer models/target --http-port "$lonely_http" \
    --grpc-listen "127.0.0.1:${lonely[$1]}" "${public[@]}" >"$work/gateway-$1.log" 2>&1 &
  servers+=($!)
}
start plain
start tls --certs "$certs"
cd clients

[ "${1:-}" = --built ] || ./build.sh "$@"
cp build/*.seconds "$work"

# ready NAME FLAG...: waits until a stack serves. If a server ends, prints all logs and fails.
ready() {
  until "$PYTHON" -m outrider_cli.main health "127.0.0.1:${gateway[$1]}" "${@:2}" \
    --service outrider.v1.GenerationService >/dev/null 2>&1; do
    for server in "${servers[@]}"; do
      kill -0 "$server" || { tail -n +1 "$work"/*.log; exit 1; }
    done
    sleep 0.5
  done
}
ready plain
ready tls --tls-ca "$certs/ca.pem"

failed=0
# checks CLIENT NAME ARGUMENT...: prints how many of the nine checks pass against a stack.
checks() {
  local said=$work/${1%%/*}-$2.run count
  "$1/run.sh" "127.0.0.1:${gateway[$2]}" "127.0.0.1:${verifier[$2]}" "127.0.0.1:${lonely[$2]}" \
    "${@:3}" >"$said" 2>&1 || failed=1
  count=$(grep -c '^ok ' "$said" || true)
  printf '  %6s of 9' "$count"
  [ "$count" = 9 ] || { failed=1; echo; cat "$said"; }
}
printf '%-12s %8s  %11s  %11s\n' client "build, s" checks "with TLS"
for built in "$work"/*.seconds; do
  client=$(basename "$built" .seconds)/client
  printf '%-12s %8s' "${client%%/*}" "$(cat "$built")"
  checks "$client" plain
  # Debian's Netty has no ALPN, without which gRPC has no TLS.
  if [ "$client" = java/client ]; then
    printf '  %11s' "no ALPN"
  else
    checks "$client" tls "$certs"
  fi
  echo
done
echo "in $SECONDS s"
exit "$failed"
