#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p build
g++ -std=c++17 -Wall -Wextra -o build/noise_test noise_test.cc
build/noise_test ../../../protos/coupled_noise.json
