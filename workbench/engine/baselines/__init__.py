"""torch's own DDP and FSDP2, as baselines."""
