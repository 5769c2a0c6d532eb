"""Parts of every process that know no model: settings, gRPC, telemetry, tasks."""
