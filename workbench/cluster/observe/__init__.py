"""Notices ranks, links and records that need a person's attention in a live run."""
