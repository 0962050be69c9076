"""Several replicas behind one address: which of them gets a request."""
