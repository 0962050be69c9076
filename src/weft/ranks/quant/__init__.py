"""Storage of quantised weights, rounding to them, and products with weights in plain torch."""
