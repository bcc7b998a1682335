"""rank: to be described."""
