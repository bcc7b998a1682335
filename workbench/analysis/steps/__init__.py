"""Steps, settings and windows of a timeline."""
