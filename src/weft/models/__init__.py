"""Architectures, written once."""
