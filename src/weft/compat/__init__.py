"""Packages under other projects' names; a user may put this folder on Python's path, see `weft.compat.vllm`."""
