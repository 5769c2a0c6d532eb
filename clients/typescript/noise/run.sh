#!/usr/bin/env bash
# Uses the tools of ../client, and installs them if they are missing.
here=$(cd "$(dirname "$0")" && pwd)
client=$here/../client
tsx=$client/node_modules/.bin/tsx
[ -x "$tsx" ] || (cd "$client" && npm install --silent --no-audit --no-fund)
exec "$tsx" "$here/noise.ts"
