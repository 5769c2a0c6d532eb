# Redis as a cache with TLS and users: `redis.sh serve` runs it, `redis.sh ping` asks for its health.
# The user `outrider` has the rights that docs/operations.md lists. Everybody else may only ping.
set -eu
cd "${OUTRIDER_SECRETS:-/run/outrider/secrets}"
if [ "$1" = ping ]; then
  redis-cli --tls --cacert ca.pem --cert redis.pem --key redis.key ping | grep -qx PONG
  exit
fi
digest() { printf %s "$(cat "$1")" | sha256sum | cut -d ' ' -f 1; }
umask 077
cat >/tmp/users.acl <<ACL
user default on nopass resetchannels -@all +ping
user outrider on #$(digest redis_password) resetchannels ~outrider:* -@all +mget +eval +set +zadd +zremrangebyscore +zrevrangebyscore +zcard +zpopmin +del +expire +scan +unlink +select +cluster|slots +command +asking
ACL
exec redis-server --aclfile /tmp/users.acl --save '' --maxmemory 384mb --maxmemory-policy allkeys-lru \
  --port 0 --tls-port 6379 --tls-auth-clients yes --tls-ca-cert-file ca.pem \
  --tls-cert-file redis.pem --tls-key-file redis.key
