"""An HTTP server's kit: connections, limits, TLS, keys of clients, errors, server-sent events."""
