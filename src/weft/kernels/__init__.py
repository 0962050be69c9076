"""Attention over paged KV, and other work that is worth its own code."""
