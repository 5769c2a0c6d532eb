#!/usr/bin/env bash
exec ruby "$(dirname "$0")/client.rb" "$@"
