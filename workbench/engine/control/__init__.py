"""How ranks agree and find each other."""
