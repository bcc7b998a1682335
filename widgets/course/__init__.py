"""Lessons for a class: a folder to hand out with answers and slides, and the marks of handed-in work."""
