"""Streams: the numbers that everybody who draws from a request's random stream shares, on the host and in kernels."""

from __future__ import annotations

# SplitMix64 (Steele, Lea, Flood 2014): the step of its counter and the multipliers of its finaliser, 64 bits each.
STEP = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB

SAMPLING_BLOCK = 256  # tokens that race as one, and then among themselves; near the square root of common vocabularies

# In place of a token: the greatest logit of its row is not finite (NaN or infinite), and nothing can be sampled.
NOT_FINITE = -1
