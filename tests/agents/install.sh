#!/usr/bin/env bash
# Installs the clients that tests/agents runs, and keeps each environment whose list is unchanged.
# `install.sh sdks` installs only the SDKs, which CI runs. npm's packages bring a Node.js.
set -euo pipefail
folder=$(dirname "$(realpath "$0")")
cd "$folder/../.."
into=build/agents
mkdir -p "$into"

# The dependencies of the listed packages have the versions of this day.
day=2026-11-27

# uv installs the packages in seconds; pip would take minutes.
[ -x "$into/uv/bin/uv" ] || {
  "${PYTHON:-python3}" -m venv "$into/uv"
  "$into/uv/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.9
}

python_environment() {
  local list=$folder/$1.txt to=$into/$1
  cmp -s "$list" "$to/installed" && return
  "$into/uv/bin/uv" venv --quiet --clear --python "${PYTHON:-python3}" "$to"
  "$into/uv/bin/uv" pip install --quiet --exclude-newer "$day" --python "$to/bin/python" -r "$list"
  cp "$list" "$to/installed"
}

npm_environment() {
  local list=$folder/$1.json to=$into/$2
  cmp -s "$list" "$to/installed" && return
  rm -rf "$to"
  mkdir -p "$to"
  cp "$list" "$to/package.json"
  npm install --silent --no-audit --no-fund --before="$day" --prefix "$to"
  cp "$list" "$to/installed"
}

python_environment sdks
npm_environment sdks sdks-node
[ "${1:-all}" = sdks ] && exit
python_environment current
npm_environment npm npm
npm_environment tools tools
