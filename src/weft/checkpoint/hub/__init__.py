"""Models on the hub and in its local cache: names, headers, downloads."""
