"""Before and after a change; one run against another."""
