"""The process of a server: its routes, its start, its shutdown, health and administration."""
