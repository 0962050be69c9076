"""Tokenisers, chat templates, streamed text."""
