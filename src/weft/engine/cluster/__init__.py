"""Several nodes: how they find, check and trust each other before their ranks start."""
