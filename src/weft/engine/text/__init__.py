"""Tokenizers, chat templates, streamed text."""
