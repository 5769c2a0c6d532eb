#!/bin/sh
# `node`: one server of a Redis Cluster. `join`: makes three of them a cluster, or tells them their new addresses.
set -eu
password=$(cat /run/outrider/secrets/redis_password)
export REDISCLI_AUTH="$password"
nodes="redis-cluster-1 redis-cluster-2 redis-cluster-3"

node() {
  umask 077
  printf 'requirepass %s\nmasterauth %s\n' "$password" "$password" >/tmp/redis.conf
  # Clients are told names, since addresses change when containers are made anew.
  exec redis-server /tmp/redis.conf --save '' --maxmemory 384mb --maxmemory-policy allkeys-lru --dir /data \
    --cluster-enabled yes --cluster-announce-hostname "$(hostname)" --cluster-preferred-endpoint-type hostname
}

state() { redis-cli -h redis-cluster-1 cluster info | tr -d '\r' | grep -q '^cluster_state:ok'; }

join() {
  addresses=
  for name in $nodes; do
    until redis-cli -h "$name" ping | grep -q PONG; do sleep 1; done
    addresses="$addresses $(getent hosts "$name" | cut -d' ' -f1)"
  done
  if redis-cli -h redis-cluster-1 cluster info | grep -q '^cluster_slots_assigned:16384'; then
    for address in $addresses; do redis-cli -h redis-cluster-1 cluster meet "$address" 6379; done
  else
    # shellcheck disable=SC2046,SC2086  # a word each
    redis-cli --cluster create $(for address in $addresses; do echo "$address:6379"; done) --cluster-yes
  fi
  until state; do sleep 1; done
}

"$1"
