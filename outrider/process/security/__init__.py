"""TLS, certificates, roles and credentials."""
