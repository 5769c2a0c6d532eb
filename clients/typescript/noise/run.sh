#!/usr/bin/env bash
# Uses the tools of ../client, and installs them if they are missing.
here=$(cd "$(dirname "$0")" && pwd)
[ -x "$here/../client/node_modules/.bin/tsx" ] || (cd "$here/../client" && npm install --silent --no-audit --no-fund)
exec "$here/../client/node_modules/.bin/tsx" "$here/noise.ts"
