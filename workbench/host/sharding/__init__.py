"""sharding: to be described."""
