"""The rules of a rank that engine and simulator share."""
