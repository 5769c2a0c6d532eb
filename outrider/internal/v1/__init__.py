"""Generated from protos/outrider/internal/v1."""
