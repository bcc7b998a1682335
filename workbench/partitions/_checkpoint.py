"""The shared choices and descriptions of activation checkpointing."""

CHECKPOINTS = ("none", "units", "attention")
CHECKPOINT = "what backward computes again to save memory: units of the model, or the attention in them"
CHECKPOINT_EVERY = "compute every n-th unit of the model again"
