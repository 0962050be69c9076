"""Model architectures as data: shapes, parameters and how they may be cut, KV bytes."""
