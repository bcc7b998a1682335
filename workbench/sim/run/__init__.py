"""The entry points of the simulator."""
