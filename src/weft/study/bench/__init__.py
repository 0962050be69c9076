"""Benchmarks: seeded workloads, load on a server, the suite, and their reports."""
