"""The HTTP server of one replica: OpenAI-compatible endpoints, health, metrics."""
