"""Work in processes that can be killed, and in threads shared fairly among tenants."""
