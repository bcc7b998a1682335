"""The shared choices and descriptions of activation checkpointing."""

CHECKPOINTS = ("none", "units", "attention")
CHECKPOINT = "what backward computes again instead of keeping it: units of the model, or the core of attention in them"
CHECKPOINT_EVERY = "of so many units that follow each other in the model one is computed again"
