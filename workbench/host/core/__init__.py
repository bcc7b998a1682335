"""Rules for all parts of host."""
