"""Seeded workloads and the report."""
