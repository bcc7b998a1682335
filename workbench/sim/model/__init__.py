"""The model of a virtual rank."""
