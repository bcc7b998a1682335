"""How rows and orders travel between kernel and engines."""
