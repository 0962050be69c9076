"""Measurements of this machine that run programs: links, kernels, the engine."""
