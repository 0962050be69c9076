"""Measurements of this machine: memory, links, kernels, and the figures kept from them."""
