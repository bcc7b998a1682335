"""The parts of lessons."""
