"""Weft inside Ray's libraries, through their public API: Ray Serve, and Ray Data for offline batches."""
