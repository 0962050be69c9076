"""Parsers of answers: an incremental parser of reasoning and tool calls for each family of chat templates."""
