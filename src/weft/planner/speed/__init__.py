"""Predicted speed of a layout, and of single steps."""
