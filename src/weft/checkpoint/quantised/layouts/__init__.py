"""Layouts of stored matrices that several published formats have."""
