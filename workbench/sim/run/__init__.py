"""The entry point of the simulator."""
