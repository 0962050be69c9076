"""Parsers of answers: reasoning and tool calls, one incremental parser for each family of chat templates."""
