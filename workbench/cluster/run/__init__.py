"""A live run as the kernel sees it."""
