"""Where each tensor lies on which rank."""
