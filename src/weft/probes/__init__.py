"""Measurements of this machine: memory, links, kernels, the engine, and the figures stored from them."""
