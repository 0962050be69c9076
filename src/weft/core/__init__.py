"""Requests, KV blocks with prefix reuse, the scheduler, step messages, the engine loop."""
