"""Offline batches: the rows of a file, answered by an engine of this process or by engines of a Ray cluster."""
