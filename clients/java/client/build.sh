#!/usr/bin/env bash
# Generates and compiles with Debian's jars. With Maven, use grpc-netty-shaded, grpc-protobuf,
# grpc-services and proto-google-common-protos instead.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p build/java build/classes
python=${PYTHON:-../../../.venv/bin/python}
rpc=$("$python" -c 'import google.rpc; print(google.rpc.__path__[0].removesuffix("/google/rpc"))')
protoc -I ../../../protos -I "$rpc" -I /usr/share/grpc-proto \
  --java_out=build/java --grpc-java_out=build/java \
  --plugin=protoc-gen-grpc-java="$(command -v grpc_java_plugin)" \
  $(cd ../../../protos && echo outrider/v1/*.proto) google/rpc/{status,error_details}.proto \
  grpc/health/v1/health.proto grpc/reflection/v1/reflection.proto
# Remove from the generated code an annotation that no Debian package has and that nothing reads.
find build/java -name '*Grpc.java' \
  -exec sed -i '/^@javax.annotation.Generated(/,/^ *comments = /d' {} +
javac -nowarn -Xlint:none -cp "$(./classpath.sh)" -d build/classes \
  $(find build/java -name '*.java') Client.java
