"""What a rank writes down, and how it reaches disk and kernel."""
