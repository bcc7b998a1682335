"""Embedding tables: strategies that keep them on servers, their verbs and what both hosts do for these."""
