"""Generated from protos/outrider/internal: messages between processes of one version."""
