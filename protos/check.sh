#!/usr/bin/env bash
# Checks the protos' style, and that they break nothing that a version has frozen. To test the
# second check, the script removes a field from a copy of the protos, and the check must fail for
# this copy. BUF names the program buf (npm: @bufbuild/buf).
set -euo pipefail
cd "$(dirname "$(realpath "$0")")"
buf=${BUF:-buf}
# compatible FOLDER RELEASED: if the protos in FOLDER break what the file RELEASED has frozen,
# prints how, and fails.
compatible() { (cd "$1" && "$buf" breaking . --path outrider/v1 --against "$2"); }

"$buf" lint
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r buf.yaml outrider "$copy"
sed -i '/int32 base_length = 2;/d' "$copy/outrider/v1/drafts.proto"
for released in "$PWD"/released/*/outrider.v1.binpb; do
  compatible . "$released"
  if found=$(compatible "$copy" "$released") || [[ $found != *base_length* ]]; then
    echo "the comparison with $released does not see that a field is gone: $found" >&2
    exit 1
  fi
done
