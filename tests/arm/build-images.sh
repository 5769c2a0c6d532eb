#!/usr/bin/env bash
# Builds images for linux/arm64 on another machine by compose/Dockerfile, and runs programs in them.
# FOLDER has the wheel of build-wheel.sh: qemu would take an hour for the compiler of the stage
# `package`, so that stage copies this wheel. Without a registry, debootstrap makes the base image.
# Needs root, a running Docker, debootstrap and qemu-user-static.
#   build-images.sh FOLDER [TARGET...]    default: gateway drafter-ngram
set -euo pipefail
wheels=$(realpath "${1:?usage: $0 FOLDER [TARGET...]}")
shift
targets=${*:-gateway drafter-ngram}
cd "$(dirname "$(realpath "$0")")/../.."
for program in docker debootstrap qemu-aarch64-static; do
  command -v "$program" >/dev/null || {
    echo "this needs $program; on Debian: apt-get install docker.io debootstrap qemu-user-static" >&2
    exit 1
  }
done
# A machine may have several clients of Docker, and not all of them can build with secrets.
for docker_build in $(which -a docker) ''; do
  case $(DOCKER_BUILDKIT=1 "${docker_build:-false}" build --help 2>/dev/null) in
    *--secret*) break ;;
  esac
done
[ -n "$docker_build" ] || {
  echo "no docker command here can build with secrets" >&2
  exit 1
}
build() {
  DOCKER_BUILDKIT=1 "$docker_build" build --quiet --platform linux/arm64 --tag "$@"
}
qemu=$(command -v qemu-aarch64-static)
base=outrider-base:arm64
work=$(mktemp -d)
misc=/proc/sys/fs/binfmt_misc
trap 'rm -rf "$work"; kill $(jobs -p) 2>/dev/null || true' EXIT

# The kernel starts programs for ARM by qemu, until a restart or `echo -1 >$misc/qemu-aarch64`. With
# F it opens qemu now, so that containers find it.
if [ ! -e "$misc/qemu-aarch64" ]; then
  [ -e "$misc/register" ] || mount -t binfmt_misc binfmt_misc "$misc"
  magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
  mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
  echo ":qemu-aarch64:M::$magic:$mask:$qemu:F" >"$misc/register"
fi

if ! docker image inspect "$base" >/dev/null 2>&1; then
  debootstrap --arch=arm64 --variant=minbase \
    --include=python3,python3-venv,libpython3-dev,ca-certificates bookworm "$work/root" >/dev/null
  rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/*
  ln -sf python3 "$work/root/usr/bin/python"
  # `docker import` would call the image one of this machine's architecture.
  mkdir "$work/base"
  tar -C "$work/root" -cf "$work/base/root.tar" .
  printf 'FROM scratch\nADD root.tar /\nCMD ["python3"]\n' >"$work/base/Dockerfile"
  build "$base" "$work/base"
  rm -rf "$work/root" "$work/base"
fi

# The context of the build, with the stage `package` replaced.
context=$work/context
mkdir -p "$context/compose" "$work/secrets"
cp -r compose/pinned compose/constraints-gpu.txt "$context/compose"
cp constraints.txt "$context"
cp -r "$wheels" "$context/package"
sed '/ AS package$/,/^$/c FROM scratch AS package\nCOPY package /package\n' compose/Dockerfile \
  >"$work/Dockerfile"
grep -q '^COPY package /package$' "$work/Dockerfile"
"${PYTHON:-python3}" compose/pip_secrets.py "$work/secrets" &
for _ in $(seq 40); do [ -e "$work/secrets/pip" ] && break; sleep 0.5; done

for target in $targets; do
  image=outrider-$target:arm64
  build "$image" --network host --build-arg "BASE=$base" \
    --secret "id=pip,src=$work/secrets/pip" --secret "id=ca,src=$work/secrets/ca" \
    --file "$work/Dockerfile" --target "$target" "$context"
  docker image inspect --format "$image: {{.Os}}/{{.Architecture}}, {{.Size}} bytes" "$image"
  run() { docker run --rm --network none --platform linux/arm64 --entrypoint "$@"; }
  machine=$(run python "$image" -c 'import platform, grpc; print(platform.machine())')
  version=$(run outrider "$image" --version)
  echo "$target runs on $machine: ${version%%$'\n'*}"
done
