"""Runs forward and backward passes of models that are not whole on one rank."""
