"""Prices: tokens of an API's provider, and of own GPUs."""
