"""The engine: from prompts to outputs, with the scheduler, the ranks' executors and the replicas."""
