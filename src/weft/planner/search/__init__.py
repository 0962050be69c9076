"""The search: candidate layouts, their objections, their ranking."""
