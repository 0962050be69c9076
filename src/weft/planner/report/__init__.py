"""Reports on a plan: advice, notes, JSON and plan files, tables."""
