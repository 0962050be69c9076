"""Export: a plan as files for other systems. `targets` lists them; each has a module of its own."""
