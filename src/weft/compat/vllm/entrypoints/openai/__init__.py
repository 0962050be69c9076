"""vLLM's package of servers of OpenAI's API."""
