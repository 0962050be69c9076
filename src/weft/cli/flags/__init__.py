"""Flags of all commands, as data."""
