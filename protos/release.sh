#!/usr/bin/env bash
# Writes protos/released/MAJOR.MINOR: the descriptors of outrider.v1 as that version freezes them.
# Run it for each version before the version's release. After the release, the version's file never
# changes. BUF names the program buf (npm: @bufbuild/buf).
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."
version=$(sed -n 's/^__version__ = "\(.*\)\..*"$/\1/p' outrider/__init__.py)
into=protos/released/$version
mkdir -p "$into"
"${BUF:-buf}" build protos --path protos/outrider/v1 --exclude-source-info \
  --output "$into/outrider.v1.binpb"
