"""Small rules that every other part of host needs."""
