"""OpenAI's /v1/responses, without anything kept between requests."""
