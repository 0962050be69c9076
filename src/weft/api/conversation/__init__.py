"""Conversations, for every API that has them: from messages and tools to a prompt, and from text to an answer."""
