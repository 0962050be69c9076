"""Memory of a layout: weights, KV cache and activations of each rank."""
