"""Model files: safetensors, GGUF, published quantisation, config.json, the hub, and the catalogue of known models."""
