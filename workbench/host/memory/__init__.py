"""A rank's memory: batches, accounts, budgets, offload."""
