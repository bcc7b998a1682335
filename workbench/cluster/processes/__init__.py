"""The processes that a lab starts."""
