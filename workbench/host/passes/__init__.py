"""Passes of models that are not whole on one rank."""
