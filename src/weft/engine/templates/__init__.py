"""Chat templates: conversations as the prompts that models know."""
