"""Sub-models: strategies that compute a part of the model, their verbs, and what both hosts do for these."""
