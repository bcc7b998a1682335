"""Tensors without data: shapes and dtypes for simulations with sizes only."""
