"""Claims: the check of statements about memory, speed and links."""
