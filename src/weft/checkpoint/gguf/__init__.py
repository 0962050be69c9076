"""GGUF metadata as a model's shape, and llama.cpp's names of tensors."""
