"""OpenAI's files and batches: uploaded files of requests, answered by the server itself, and kept on disk."""
