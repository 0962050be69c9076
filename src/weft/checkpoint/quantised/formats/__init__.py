"""Published weight formats, a module each: its fields in config.json, its tensors, and its names in other systems."""
