"""Files of models: safetensors, GGUF, published quantisation, config.json, the hub, and the models known by name."""
