"""Second order: strategies that use a model's curvature, their verbs, and what both hosts do for these."""
