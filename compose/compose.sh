#!/usr/bin/env bash
# Runs Docker Compose on compose.yaml, as Docker's plugin or as docker-compose (1.29 and later),
# whichever is installed. Takes Compose's own arguments.
set -euo pipefail
file=$(dirname "$0")/compose.yaml
if docker compose version >/dev/null 2>&1; then
  exec docker compose -f "$file" "$@"
fi
command -v docker-compose >/dev/null || {
  echo "Docker Compose is missing: compose/install-engine.sh installs it on Debian and Ubuntu" >&2
  exit 1
}
# The Dockerfile needs BuildKit, which this version uses only when told.
export DOCKER_BUILDKIT=1 COMPOSE_DOCKER_CLI_BUILD=1
exec docker-compose -f "$file" "$@"
