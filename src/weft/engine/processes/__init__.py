"""Child processes and connections: start, frames, signs of life, keys and TLS."""
