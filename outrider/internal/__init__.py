"""Generated from protos/outrider/internal: what no other version has to understand."""
