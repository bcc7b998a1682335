"""Tensors that are a shape and a type, and nothing else."""
