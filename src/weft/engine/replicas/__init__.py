"""Engines in threads and processes, one or several of a model: start, routing, hand-over, restart."""
