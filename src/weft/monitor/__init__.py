"""Live sight of a machine and its servers: links, checks and diagnosis."""
