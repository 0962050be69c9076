"""Replicas behind a gateway: connections, health, circuit breakers, and the routing policies."""
