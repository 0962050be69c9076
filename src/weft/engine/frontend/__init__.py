"""Prompts in, outputs out: texts to token ids and requests, token ids to texts and vectors."""
