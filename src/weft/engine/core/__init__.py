"""Requests, KV blocks with prefix reuse, the scheduler, step messages and the engine loop."""
