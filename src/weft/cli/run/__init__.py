"""Commands that run a model without a server: run, chat, batch, demo, shard."""
