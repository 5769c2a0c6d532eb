"""A process's parts that know no model: settings, gRPC, telemetry, tasks."""
