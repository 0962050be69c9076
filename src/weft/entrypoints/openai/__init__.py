"""Servers of OpenAI's API."""
