"""Ranks: the processes that hold weights and compute. Only this area imports torch."""
