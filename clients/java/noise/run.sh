#!/usr/bin/env bash
cd "$(dirname "$0")"
exec java -cp /usr/share/java/gson.jar Noise.java ../../../protos/coupled_noise.json
