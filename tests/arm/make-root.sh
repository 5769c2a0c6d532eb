#!/usr/bin/env bash
# Makes build/arm64: what a drafter needs on 64-bit ARM, for tests under qemu. Debian's packages
# come from this machine's own sources. Python's packages come from pip's index, in the versions and
# with the hashes of compose/pinned. The index's torch for ARM contains CUDA, so that this takes 6
# GB. A root that was made from the same files is left alone.
set -euo pipefail
script=$(realpath "$0")
cd "$(dirname "$script")/../.."
into=build/arm64
pinned=compose/pinned/heavy.txt
wanted=$(cat "$script" "$pinned" constraints.txt | sha256sum)
[ "$(cat "$into/made" 2>/dev/null)" = "$wanted" ] && exit
for program in qemu-aarch64 apt-get dpkg; do
  command -v "$program" >/dev/null || {
    echo "this needs $program; on Debian: apt-get install qemu-user" >&2
    exit 1
  }
done
mkdir -p "$into"
rm -rf "${into:?}"/*

# apt gets a state and a cache of its own here, so that the packages of this machine stay as they
# are.
apt=$(realpath "$into")/apt
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
: >"$apt/status"
of_arm() {
  apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root \
    -o Dir::State="$apt" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" "$@"
}
echo "downloading Debian's packages for ARM"
of_arm update
of_arm install --yes --download-only --no-install-recommends python3-minimal libpython3-stdlib \
  libpython3-dev libgomp1 libstdc++6 >/dev/null
for package in "$apt"/cache/archives/*.deb; do dpkg -x "$package" "$into/root"; done
rm -rf "$apt"

# pip takes the files for these systems, but evaluates the markers of requirements with this
# interpreter's version. Debian's Python may be older than the images' Python, so one marker is
# removed.
version=$(basename "$(readlink "$into/root/usr/bin/python3")")
packages=$into/root/usr/lib/python3/dist-packages
systems=$(seq -f '--platform manylinux_2_%g_aarch64' 17 36)
list=$into/packages.txt
sed "s/ ; python_full_version < '3.11.3'//" "$pinned" >"$list"
of_python() {
  # shellcheck disable=SC2086
  "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-cache-dir \
    --only-binary :all: --implementation cp --python-version "${version#python}" \
    --platform manylinux2014_aarch64 $systems --target "$packages" "$@" \
    2> >(grep -v '^WARNING: \(Target\|Location\)' >&2)
}
echo "downloading Python's packages for ARM, 3 GB, with torch"
of_python --no-deps --require-hashes -r "$list"
grep -v '^ ' "$list" | sed 's/ *\\$//' >"$into/versions.txt"
of_python -c "$into/versions.txt" -c constraints.txt torch

# qemu 7.2 shows this machine's /proc/cpuinfo. torch asks a library about the processor, and the
# library crashes when it reads that file. So a file below the root hides /proc/cpuinfo, and lists
# two Neoverse V2 cores as Linux does.
mkdir -p "$into/root/proc"
for core in 0 1; do
  cat <<EOF
processor	: $core
BogoMIPS	: 2000.00
Features	: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimddp sve sve2 i8mm bf16
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x0
CPU part	: 0xd4f
CPU revision	: 0

EOF
done >"$into/root/proc/cpuinfo"
echo "$wanted" >"$into/made"
