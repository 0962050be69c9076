"""Model architectures as data: shapes, parameters and the axes that cut them, KV-cache bytes."""
