"""A coarse simulator of thousands of verifiers and drafters, by rates and queues."""
