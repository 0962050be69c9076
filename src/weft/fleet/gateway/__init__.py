"""Several replicas behind one address: routing policies."""
