"""Who is slow, why, and what it costs the others."""
