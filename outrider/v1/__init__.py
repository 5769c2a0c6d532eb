"""Generated from protos/outrider/v1 by protos/generate.sh; do not edit."""
