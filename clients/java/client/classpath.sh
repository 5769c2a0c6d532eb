#!/usr/bin/env bash
# Prints the class path: Debian's gRPC and the jars that it needs at run time.
cd /usr/share/java
names="grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite grpc-stub
  protobuf guava failureaccess gson perfmark-api netty-buffer netty-codec netty-codec-http
  netty-codec-http2 netty-common netty-handler netty-resolver netty-transport"
for name in $names; do [ -e "$name.jar" ] && printf '%s:' "$PWD/$name.jar"; done
