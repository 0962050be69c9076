"""Endpoints of OpenAI's API: chat, completions, embeddings, scores and models."""
