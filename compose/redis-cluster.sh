#!/bin/sh
# `node` runs one server of a Redis Cluster. `join` makes a cluster of three servers, or tells an
# existing cluster the new addresses of its servers.
set -eu
password=$(cat /run/outrider/secrets/redis_password)
export REDISCLI_AUTH="$password"
nodes="redis-cluster-1 redis-cluster-2 redis-cluster-3"

node() {
  umask 077
  printf 'requirepass %s\nmasterauth %s\n' "$password" "$password" >/tmp/redis.conf
  # Clients get host names, since a new container has a new address.
  exec redis-server /tmp/redis.conf --save '' --dir /data \
    --maxmemory 384mb --maxmemory-policy allkeys-lru \
    --cluster-enabled yes --cluster-announce-hostname "$(hostname)" \
    --cluster-preferred-endpoint-type hostname
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
    # `--cluster create` waits for ever if a slow machine loses the handshake of two servers.
    # `timeout` ends such a wait with status 124, and the loop below sends the handshake again. Any
    # other status is an error.
    # shellcheck disable=SC2046,SC2086  # each address is a word of its own
    timeout 30 redis-cli --cluster create --cluster-yes \
      $(for address in $addresses; do echo "$address:6379"; done) || [ $? = 124 ]
  fi
  until state; do
    for address in $addresses; do redis-cli -h redis-cluster-1 cluster meet "$address" 6379; done
    sleep 2
  done
}

"$1"
