"""Collectives on torch.distributed."""
