"""Export: a plan in other systems' words. `targets` lists them; each has a file of its own."""
