"""What every other part of host needs."""
