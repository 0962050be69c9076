"""File formats, read without torch: safetensors, GGUF, YAML, sharded state."""
