#!/usr/bin/env bash
# Generates, builds and runs every client against one real stack; each must pass nine checks. Also
# checks the coupled noise of every language. Needs Node 20, cargo, and Debian with root or with the
# packages of clients/*/*/packages.txt installed. With --built, install.sh and build.sh have run.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd .. && pwd)
export PYTHON=${PYTHON:-$root/.venv/bin/python}
work=$(mktemp -d)
servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true; wait; rm -rf "$work"' EXIT
clients=(*/client)

[ "${1:-}" = --built ] || ./install.sh

port() { "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
http=$(port) gateway=$(port) verifier=$(port) lonely_http=$(port) lonely=$(port)
cd "$root"
"$PYTHON" -m outrider.launch.cli serve --target models/target --drafter ngram --dtype float32 \
  --http-port "$http" --grpc-port "$gateway" --verifier-port "$verifier" >"$work/serve.log" 2>&1 &
servers+=($!)
# A gateway without a verifier, for the check "unavailable".
"$PYTHON" -m gateway --verifier 127.0.0.1:1 --tokenizer models/target \
  --http-port "$lonely_http" --grpc-listen "127.0.0.1:$lonely" >"$work/gateway.log" 2>&1 &
servers+=($!)
cd clients

[ "${1:-}" = --built ] || ./build.sh
cp build/*.seconds build/*.noise "$work"

ready() { "$PYTHON" -m outrider.launch.cli health "127.0.0.1:$1" --service "$2" >/dev/null 2>&1; }
until ready "$gateway" outrider.v1.GenerationService; do
  kill -0 "${servers[0]}" || { cat "$work/serve.log"; exit 1; }
  sleep 0.5
done

failed=0
printf '%-12s %8s  %s\n' client "build, s" checks
for client in "${clients[@]}"; do
  language=${client%%/*}
  "$client/run.sh" "127.0.0.1:$gateway" "127.0.0.1:$verifier" "127.0.0.1:$lonely" >"$work/$language.run" 2>&1 || failed=1
  count=$(grep -c '^ok ' "$work/$language.run" || true)
  printf '%-12s %8s  %s of 9\n' "$language" "$(cat "$work/$language.seconds")" "$count"
  [ "$count" = 9 ] || { failed=1; cat "$work/$language.run"; }
done
printf '\n%-12s %s\n' noise vectors
for noise in */noise; do
  said=$(cat "$work/${noise%%/*}.noise")
  if [ "$said" = "ok noise" ]; then said=agree; else failed=1; fi
  printf '%-12s %s\n' "${noise%%/*}" "$said"
done
echo "in $SECONDS s"
exit "$failed"
