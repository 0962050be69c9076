"""Offline batches: the rows of a file, answered by an engine of this process or by those of a Ray cluster."""
