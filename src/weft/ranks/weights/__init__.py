"""The loader: from a checkpoint's tensors to a rank's parameters."""
