#!/usr/bin/env bash
# Makes what the processes of a cluster need to know each other: certificates, an operator's API key,
# which it prints, a password for Redis, and the secret from which the n-grams' keys are made.
#   compose/secrets.sh DIRECTORY [NAME...]
# Clients outside reach the gateway under each NAME. A second run renews the certificates and keeps
# everything else. Keep DIRECTORY/ca.key off the cluster. Needs `outrider` and openssl.
set -euo pipefail
umask 077
[ $# -gt 0 ] || { sed -n '2,6s/^# *//p' "$0" >&2; exit 2; }
directory=$1
hosts=(outrider-gateway{,.outrider,.outrider.svc,.outrider.svc.cluster.local} gateway "${@:2}")
outrider certs "$directory" --role verifier --role drafter --role operator
outrider certs "$directory" --role gateway --host "$(IFS=,; echo "${hosts[*]}")"
outrider certs "$directory" --role redis --host outrider-redis,redis
[ -e "$directory/keys.yaml" ] ||
  outrider keys add "$directory/keys.yaml" --tenant operator --role operator
for name in redis_password pool_secret; do
  [ -e "$directory/$name" ] || openssl rand -hex 32 >"$directory/$name"
done
