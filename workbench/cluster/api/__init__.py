"""The parts of `workbench.Lab`."""
