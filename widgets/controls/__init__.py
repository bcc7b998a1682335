"""Inputs and buttons of a lab."""
