#!/usr/bin/env bash
# Builds the images, starts the stack, crashes parts of it under load and stops it. Prints a table
# with the result of each step. For Linux.
#   --bases                 only get the images that others are built on
#   --versions              also give all services another version and back under load; this takes
#                           some minutes
#   --keep                  leave the stack (and an engine that was started for it) running
#   --allow-missing-engine  exit with 0 if no container engine can run
# Uses the project and the tag "outrider-ci", so other images and volumes are not touched.
set -euo pipefail
cd "$(dirname "$0")/.."

bases='' versions='' keep='' allow_missing=''
for argument; do
  case $argument in
    --bases) bases=1 ;;
    --versions) versions=1 ;;
    --keep) keep=1 ;;
    --allow-missing-engine) allow_missing=1 ;;
    --help)
      sed -n '2,/^[^#]/s/^# \?//p' "$0"
      exit
      ;;
    *)
      echo "ci-up.sh: $argument is none of --bases, --versions, --keep and --allow-missing-engine" >&2
      exit 2
      ;;
  esac
done

base=${OUTRIDER_BASE:-python:3.11.14-slim-bookworm}
redis=${OUTRIDER_REDIS_IMAGE:-redis:7.4.6-bookworm}
prometheus=${OUTRIDER_PROMETHEUS_IMAGE:-prom/prometheus:v3.1.0}
log=$PWD/compose/ci-up.log
work=$(mktemp -d)
python=${OUTRIDER_CHECK_PYTHON:-$PWD/.venv/bin/python}
targets="gateway drafter-ngram drafter-model verifier"
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' outrider/__init__.py)
other_version=99.0.0 other_tag=outrider-ci-other
rows=()
: >"$log"

# Variables of compose.yaml. The checks compare texts, so the models compute in float32, in which
# texts do not depend on the batch. The bundled target is faster than the grown target, which has a
# check of its own.
export COMPOSE_PROJECT_NAME=outrider-ci COMPOSE_PROFILES=cpu PYTHONPATH=$PWD
export OUTRIDER_TAG=outrider-ci OUTRIDER_DTYPE=float32 OUTRIDER_TARGET=models/target
export OUTRIDER_HTTP_PORT=${OUTRIDER_HTTP_PORT:-18000}
export OUTRIDER_GRPC_PORT=${OUTRIDER_GRPC_PORT:-18001}
export OUTRIDER_URL=http://127.0.0.1:$OUTRIDER_HTTP_PORT
export OUTRIDER_BASE=$base OUTRIDER_REDIS_IMAGE=$redis OUTRIDER_PROMETHEUS_IMAGE=$prometheus
export OUTRIDER_PROMETHEUS_PORT=${OUTRIDER_PROMETHEUS_PORT:-18090}
# Two models whose threads meet at barriers on the same cores hold each other up.
cores=$(nproc)
if [ "$cores" -gt 1 ]; then
  export OUTRIDER_VERIFIER_CPUSET=0-$((cores - 2)) OUTRIDER_DRAFTER_CPUSET=$((cores - 1))
fi

say() { echo "$*" | tee -a "$log"; }

# step NAME COMMAND...: runs the command with its output in the log, and adds a row to the table.
# The script ends if the command fails. 124 is the status of timeout(1), and of functions here that
# have waited for as long as they may.
step() {
  local name=$1 began=$EPOCHREALTIME status=0 result=ok note
  shift
  printf '== %s\n' "$name" >>"$log"
  set +e
  (set -e; "$@") >"$work/out" 2>&1
  status=$?
  set -e
  cat "$work/out" >>"$log"
  note=$(sed -n 's/^note: //p' "$work/out" | tail -1)
  [ $status = 0 ] || result=FAILED
  [ $status != 124 ] || result='time limit'
  rows+=("$(printf '%-34s %6.1f  %-10s  %s' "$name" "$(since "$began")" "$result" "$note")")
  echo "${rows[-1]}"
  [ $status = 0 ] || { tail -40 "$work/out" >&2; exit 1; }
}

since() { awk -v began="$1" -v now="$EPOCHREALTIME" 'BEGIN { printf "%.1f", now - began }'; }

# --- the engine

engine_answers() { docker info >/dev/null 2>&1; }

start_engine() {
  local options
  engine_answers && { echo "note: was running"; return; }
  local problem="no container engine answers, and"
  [ "$(id -u)" = 0 ] || { echo "$problem starting one needs root"; return 1; }
  command -v dockerd >/dev/null || { echo "$problem dockerd is not installed"; return 1; }
  # Some kernels of small machines lack overlayfs or netfilter.
  for options in "" "--storage-driver=vfs" "--storage-driver=vfs --iptables=false"; do
    # shellcheck disable=SC2086  # each option is a word of its own
    setsid dockerd $options >"$work/dockerd.log" 2>&1 &
    echo $! >"$work/dockerd.pid"
    for _ in $(seq 30); do
      engine_answers && { echo "note: started dockerd $options"; return; }
      kill -0 "$(cat "$work/dockerd.pid")" 2>/dev/null || break
      sleep 1
    done
    stop_engine
  done
  tail -20 "$work/dockerd.log"
  return 1
}

stop_engine() {
  [ -e "$work/dockerd.pid" ] || return 0
  local pid
  pid=$(cat "$work/dockerd.pid")
  kill "$pid" 2>/dev/null || true
  for _ in $(seq 30); do kill -0 "$pid" 2>/dev/null || break; sleep 1; done
  rm "$work/dockerd.pid"
}

files=() # beside compose.yaml
stack='' # of the swarm, once there is one
compose() { compose/compose.sh "${files[@]}" "$@"; }

# --- images

# Prints a docker command that can pass secrets to a build. Newer versions of Docker need a plugin
# for that, older versions do not.
builder() {
  local candidate
  for candidate in $(which -a docker); do
    case $(DOCKER_BUILDKIT=1 "$candidate" build --help 2>/dev/null) in
      *--secret*) echo "$candidate"; return ;;
    esac
  done
  echo "no docker command here can build with secrets" >&2
  return 1
}

have_image() { docker image inspect "$1" >/dev/null 2>&1 || timeout 300 docker pull --quiet "$1"; }

# If the official image cannot be pulled, builds one from the same release of Debian. Debian's own
# Python is another build of 3.11. Its headers are installed, because the official image has headers
# too.
base_image() {
  have_image "$base" && return
  local root=$work/root
  debootstrap --variant=minbase \
    --include=python3,python3-venv,libpython3-dev,ca-certificates bookworm "$root"
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  ln -sf python3 "$root/usr/bin/python"
  tar -C "$root" -c . | docker import --change 'CMD ["python3"]' - "$base"
  rm -rf "$root"
  echo "note: $base by debootstrap"
}

redis_image() {
  have_image "$redis" && return
  docker_build=$(builder)
  DOCKER_BUILDKIT=1 "$docker_build" build --network host --tag "$redis" - <<EOF
FROM $base
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server \
 && rm -rf /var/lib/apt/lists/* && install -d -o 999 -g 999 /data
CMD ["redis-server"]
EOF
  echo "note: $redis by apt-get"
}

# Debian's Prometheus is older than the pinned one, but reads the same configuration.
prometheus_image() {
  have_image "$prometheus" && return
  docker_build=$(builder)
  DOCKER_BUILDKIT=1 "$docker_build" build --network host --tag "$prometheus" - <<EOF
FROM $base
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus wget \
 && rm -rf /var/lib/apt/lists/* && install -d -o 65534 -g 65534 /prometheus
EOF
  echo "note: by apt-get"
}

build_images() {
  local target docker_build serving
  docker_build=$(builder)
  mkdir -p "$work/secrets"
  "$python" compose/pip_secrets.py "$work/secrets" &
  serving=$!
  # shellcheck disable=SC2064  # expanded now, since the variable is local
  trap "kill $serving" EXIT
  for _ in $(seq 20); do [ -e "$work/secrets/pip" ] && break; sleep 0.5; done
  for target in $targets; do
    DOCKER_BUILDKIT=1 timeout 900 "$docker_build" build --progress plain --network host \
      --build-arg "BASE=$base" --build-arg "COMMIT=$(git rev-parse --short=12 HEAD)" \
      --secret "id=pip,src=$work/secrets/pip" --secret "id=ca,src=$work/secrets/ca" \
      --file compose/Dockerfile --target "$target" --tag "outrider-$target:$OUTRIDER_TAG" .
  done
}

# Makes the same images with another version, to stand for the images of another release.
other_images() {
  local target docker_build
  docker_build=$(builder)
  for target in $targets; do
    DOCKER_BUILDKIT=1 "$docker_build" build --tag "outrider-$target:$other_tag" - <<EOF
FROM outrider-$target:$OUTRIDER_TAG
USER root
RUN sed -i 's/^__version__ = .*/__version__ = "$other_version"/' \
  /opt/outrider/lib/python3*/site-packages/outrider/__init__.py
USER 10001:10001
EOF
  done
}

bytes() { docker image inspect --format '{{.Size}}' "$1"; }

image_sizes() {
  local target above note=''
  for target in $targets; do
    above=$((($(bytes "outrider-$target:$OUTRIDER_TAG") - $(bytes "$base")) / 1000000))
    note="$note $target $above MB,"
    case $target in
      gateway | drafter-ngram)
        [ $above -lt 250 ] || { echo "$target: $above MB above the base, not under 250"; return 1; }
        ;;
    esac
  done
  echo "note: above the base:${note%,}"
}

# in_image TARGET PROGRAM ARGUMENT...: runs a program in a new container of an image.
in_image() {
  docker run --rm --network none --entrypoint "$2" "outrider-$1:$OUTRIDER_TAG" "${@:3}"
}

images_hold_no_more() {
  local target
  for target in $targets; do
    # shellcheck disable=SC2016  # the container's shell expands these
    in_image "$target" sh -ec 'test $(id -u) = 10001
      for no in /run/secrets/* /opt/outrider/bin/pip /usr/bin/gcc; do test ! -e $no; done'
  done
  in_image gateway outrider --help >/dev/null
  in_image verifier python -c 'import verifier_svc.engine.loop as engine
assert engine.__file__.endswith(".so"), "the step is not compiled"'
  in_image verifier python -c 'from outrider.lm.cpu.library import *
assert load_build(runnable_builds()[0])'
  case $(in_image gateway python -m verifier_svc --target x 2>&1) in
    *"in Outrider's sources, pip install '.[models]'"*) ;;
    *) echo "a verifier without torch does not name the extra"; return 1 ;;
  esac
}

# Makes the default target as a verifier does at its first start.
grown_target() {
  docker run --rm --network none --read-only --tmpfs /tmp --volume "$PWD/models:/models:ro" \
    --volume /grown --entrypoint python "outrider-verifier:$OUTRIDER_TAG" \
    -m outrider_bench.grow models/target grown/target-154m
}

# --- the stack

containers() {
  docker ps --all --quiet --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" "$@"
}

# of_service SERVICE [OPTION...]: a container of the service; `docker ps` gets the options.
of_service() { containers --filter "label=com.docker.compose.service=$1" "${@:2}" | head -1; }

# wait_healthy COUNT: waits until COUNT containers are healthy.
wait_healthy() {
  local healthy
  for _ in $(seq 120); do
    healthy=$(containers --filter health=healthy | wc -l)
    [ "$healthy" = "$1" ] && { echo "note: $1 containers"; return; }
    sleep 1
  done
  compose ps
  compose logs --no-color --tail 30
  return 124
}

profiles_are_valid() {
  local profile
  for profile in cpu gpu grace grammar redis-cluster observability; do
    COMPOSE_PROFILES=$profile compose config --quiet
    COMPOSE_PROFILES=$profile compose -f compose/tls.yaml config --quiet
    COMPOSE_PROFILES=$profile compose -f compose/egress.yaml config --quiet
  done
}

up=(up --detach --no-build --scale drafter-ngram=2)
up() { compose "${up[@]}"; }

# asks ADDRESS SERVICE OPTION...: succeeds if the service serves there.
asks() { "$python" -m outrider_cli.main health "$1" --service "outrider.v1.$2" "${@:3}"; }

# The verifier's port is not published, but this machine reaches a container by its address.
verifier_address() {
  docker inspect --format '{{range .NetworkSettings.Networks}}{{.IPAddress}}:50051{{end}}' \
    "$(of_service verifier)"
}

# health OPTION...: the options are those for the verifier.
health() {
  asks "127.0.0.1:$OUTRIDER_GRPC_PORT" GenerationService
  asks "$(verifier_address)" VerifierService "$@"
  if asks "$(verifier_address)" Nothing "$@"; then return 1; fi
}

# A host behind this one, in a network namespace of its own. The addresses are from the range that
# is reserved for tests.
outside=outrider-ci
outside_address=198.18.0.2

outside_up() {
  ip netns add "$outside"
  ip link add "$outside" type veth peer name eth0 netns "$outside"
  ip address add 198.18.0.1/30 dev "$outside"
  ip link set "$outside" up
  ip -n "$outside" address add "$outside_address/30" dev eth0
  ip -n "$outside" link set eth0 up
  ip -n "$outside" route add default via 198.18.0.1
  ip netns exec "$outside" "$python" -m http.server --bind "$outside_address" 8080 >>"$log" 2>&1 &
  for _ in $(seq 50); do
    timeout 1 bash -c "</dev/tcp/$outside_address/8080" 2>/dev/null && return
    sleep 0.2
  done
  return 1
}

outside_down() {
  ip netns list 2>/dev/null | grep -q "^$outside\b" || return 0
  ip netns pids "$outside" | xargs -r kill
  ip netns delete "$outside"
}

reaches_outside() {
  local try="</dev/tcp/$outside_address/8080"
  docker exec "$(of_service "$1")" timeout 3 bash -c "$try" 2>/dev/null
}

# The gateway is on a network with a way out, since its ports are published. It must reach the host
# outside, which shows that the host answers; the other services must not reach this host.
no_way_out() {
  local service status=0
  outside_up || { echo "no host outside could be made"; return 1; }
  reaches_outside gateway || { echo "gateway does not reach a host outside"; status=1; }
  for service in verifier drafter-model drafter-ngram redis; do
    if reaches_outside "$service"; then
      echo "$service reaches a host outside"
      status=1
    fi
  done
  outside_down
  return $status
}

crash() { "$python" compose/check.py crash "$work/plain.json" "$1" "$(of_service "$2")"; }

# Tries again and again: after a loss or a delay of Redis, drafters ask it nothing for up to 10 s.
pool_fills() {
  for _ in $(seq 10); do
    "$python" compose/check.py requests
    if pool "$1"; then return; fi
    sleep 2
  done
  return 1
}

# update TAG VERSION COUNT COMMAND...: the command gives the gateway and COUNT verifiers the images
# with this tag and version while requests stream.
update() {
  OUTRIDER_TAG=$1 "$python" compose/check.py update "$work/plain.json" "$2" "$3" "${@:4}"
}

# another_version COUNT COMMAND...: an upgrade of COUNT verifiers and all other services, and then a
# downgrade.
another_version() {
  step "an upgrade under load" update "$other_tag" "$other_version" "$@"
  step "a downgrade under load" update "$OUTRIDER_TAG" "$version" "$@"
}

# Moves the drafters to a Redis Cluster; the verifier and the gateway do not notice.
cluster() {
  export COMPOSE_PROFILES=cpu,redis-cluster
  local node=redis://redis-cluster
  export OUTRIDER_REDIS=$node-1:6379,$node-2:6379,$node-3:6379 OUTRIDER_REDIS_CLUSTER=true
  up
  timeout 180 docker wait "$(of_service redis-cluster-join)"
  wait_healthy 10
  pool_fills redis-cluster-1
}

# Prometheus finds gateway, verifier and three drafters only by the names of their services.
scraped() {
  local up api=http://127.0.0.1:$OUTRIDER_PROMETHEUS_PORT/api/v1
  compose up --detach --no-build prometheus
  for _ in $(seq 60); do
    up=$(curl --silent "$api/query?query=count(up==1)" | grep -o '"[0-9]*"\]' || true)
    [ "$up" = '"5"]' ] && { echo "note: 5 processes are scraped"; return; }
    sleep 1
  done
  curl --silent "$api/targets"
  return 124
}

redis_cli=(redis-cli)

# pool SERVICE: checks that a Redis holds the drafters' n-grams, and needs the password.
pool() {
  local keys redis
  redis=$(of_service "$1")
  # shellcheck disable=SC2016  # the container's shell expands this
  keys=$(docker exec "$redis" sh -c \
    'REDISCLI_AUTH=$(cat /run/outrider/secrets/redis_password) "$@"' sh "${redis_cli[@]}" dbsize)
  [ "$keys" -gt 0 ] || { echo "$1 holds nothing"; return 1; }
  if docker exec "$redis" "${redis_cli[@]}" dbsize | grep -q '^[0-9]'; then
    echo "$1 answers without a password"
    return 1
  fi
  echo "note: $keys keys in $1"
}

# Makes certificates, and gives each service the files of its role, as README.md does.
certificates() {
  local as_root=() role owner
  [ "$(id -u)" = 0 ] || as_root=(sudo)
  "$python" -m outrider_cli.main certs "$certs" --host gateway,redis
  for role in gateway:10001 verifier:10001 drafter:10001 redis:999 operator:65534; do
    owner=${role#*:} role=${role%:*}
    "${as_root[@]}" install -D -m 400 -o "$owner" -t "$OUTRIDER_CERTS/$role" \
      "$certs/ca.pem" "$certs/$role.pem" "$certs/$role.key"
  done
}

# Moves all services to TLS. The functions above then check them over TLS.
to_tls() {
  certificates
  up
  wait_healthy 10
  OUTRIDER_VERIFIER_TLS_CA=$certs/ca.pem OUTRIDER_VERIFIER_TLS_CERT=$certs/operator.pem \
    OUTRIDER_VERIFIER_TLS_KEY=$certs/operator.key health --role verifier
  # A caller without a certificate is refused.
  if asks "$(verifier_address)" VerifierService; then return 1; fi
  if curl --silent "http://127.0.0.1:$OUTRIDER_HTTP_PORT/livez"; then return 1; fi
}

stop() {
  local container code
  compose stop
  for container in $(containers); do
    code=$(docker inspect --format '{{.State.ExitCode}}' "$container")
    if [ "$code" != 0 ]; then
      docker inspect --format "{{.Name}} exited with $code" "$container"
      docker logs --tail 20 "$container"
      return 1
    fi
  done
  echo "note: $(containers | wc -l) containers exited with 0"
}

# --- the swarm

# A machine that is in a swarm stays there.
swarm_up() {
  local is_member
  is_member=$(docker info --format '{{.Swarm.LocalNodeState}}')
  [ "$is_member" = active ] ||
    { docker swarm init --advertise-addr 127.0.0.1 && touch "$work/is-manager"; }
  PATH=$(dirname "$python"):$PATH compose/secrets.sh "$OUTRIDER_SECRETS" >"$work/secrets.out"
  tail -1 "$work/secrets.out" >"$work/key"
  "${deploy[@]}"
  for _ in $(seq 120); do
    curl --silent --fail --output /dev/null --cacert "$SSL_CERT_FILE" "$OUTRIDER_URL/readyz" &&
      return
    sleep 1
  done
  docker stack ps --no-trunc "$stack"
  docker service logs --tail 30 "${stack}_gateway"
  return 1
}

swarm_down() {
  docker stack rm "$stack"
  for _ in $(seq 60); do
    [ -n "$(docker ps --all --quiet --filter "label=com.docker.stack.namespace=$stack")" ] || break
    sleep 1
  done
  docker volume rm --force "${stack}_hub"
  [ ! -e "$work/is-manager" ] || docker swarm leave --force
}

scale() { "$python" compose/check.py scale "$work/plain.json" "${stack}_verifier"; }

table() {
  printf '\n%-34s %6s  %-10s  %s\n' step seconds result note
  printf '%s\n' "${rows[@]}"
}

clean_up() {
  local status=$?
  trap - EXIT
  outside_down
  [ $status = 0 ] || compose logs --no-color --tail 100 >>"$log" 2>&1 || true
  # All profiles that were used, since `down` removes only the services of active profiles.
  export COMPOSE_PROFILES=cpu,redis-cluster,observability
  if [ -z "$keep" ] && engine_answers; then
    compose down --volumes --remove-orphans >>"$log" 2>&1 || true
    [ -z "$stack" ] || swarm_down >>"$log" 2>&1 || true
  fi
  if [ -z "$keep" ]; then
    stop_engine
  elif engine_answers && [ -n "$(of_service gateway --filter status=running)" ]; then
    echo "left running: $OUTRIDER_URL"
  fi
  [ ${#rows[@]} = 0 ] || table | tee -a "$log"
  rm -rf "$work"
  exit $status
}

trap clean_up EXIT
trap 'exit 130' INT TERM
[ -n "$bases" ] || [ -x "$python" ] || make --no-print-directory .venv/installed
if [ -n "$allow_missing" ] && ! (start_engine) >>"$log" 2>&1; then
  say "no container engine can run here ($log says why); nothing was checked"
  exit 0
fi
step "engine" start_engine
step "compose.yaml in each profile" profiles_are_valid
step "base image" base_image
step "redis image" redis_image
step "prometheus image" prometheus_image
[ -z "$bases" ] || exit 0
step "build four images" build_images
[ -z "$versions" ] || step "the same with another version" other_images
step "sizes" image_sizes
step "no secret, compiler or root inside" images_hold_no_more
step "the default target" grown_target
compose down --volumes --remove-orphans >>"$log" 2>&1
step "up, drafter-ngram twice" up
step "healthy" wait_healthy 6
step "health over gRPC" health
step "no way out" no_way_out
step "Prometheus" scraped
step "requests" "$python" compose/check.py requests
step "50 streams, plain" "$python" compose/check.py plain "$work/plain.json"
step "50 streams, drafter-model killed" crash model drafter-model
step "50 streams, drafter-ngram killed" crash ngram drafter-ngram
step "n-grams in Redis" pool_fills redis
step "50 streams, Redis killed" crash ngram redis
step "healthy again" wait_healthy 7
step "n-grams in Redis again" pool_fills redis
[ -z "$versions" ] || another_version 1 compose/compose.sh "${up[@]}"
step "Redis Cluster instead" cluster
certs=$work/certs
files+=(-f compose/tls.yaml)
redis_cli=(redis-cli --tls --cacert /run/outrider/certs/ca.pem
  --cert /run/outrider/certs/redis.pem --key /run/outrider/certs/redis.key)
export OUTRIDER_CERTS=$work/mounted OUTRIDER_URL=https://127.0.0.1:$OUTRIDER_HTTP_PORT
export SSL_CERT_FILE=$certs/ca.pem
step "TLS instead" to_tls
step "n-grams in Redis over TLS" pool_fills redis
step "Prometheus over TLS" scraped
step "no root, rights or writes" "$python" compose/check.py rights \
  "com.docker.compose.project=$COMPOSE_PROJECT_NAME"
[ -z "$keep" ] || exit 0
step "stop" stop
stack=$COMPOSE_PROJECT_NAME-swarm
# The kernel may lack IPVS, so the swarm publishes its ports in the mode `host`. The swarm runs no
# draft model, since two cores are few; the steps above have checked one.
export OUTRIDER_PORT_MODE=host OUTRIDER_MODEL_DRAFTERS=0 OUTRIDER_NGRAM_DRAFTERS=1
export OUTRIDER_SECRETS=$work/swarm SSL_CERT_FILE=$work/swarm/ca.pem
deploy=(docker stack deploy --resolve-image never --compose-file compose/stack.yaml "$stack")
step "a swarm instead" swarm_up
OUTRIDER_API_KEY=$(cat "$work/key")
export OUTRIDER_API_KEY
step "2, 3, 1 verifiers, and an update" scale
[ -z "$versions" ] || another_version 2 "${deploy[@]}"
step "no root, rights or writes in it" "$python" compose/check.py rights \
  "com.docker.stack.namespace=$stack"
step "no swarm" swarm_down
stack=''
