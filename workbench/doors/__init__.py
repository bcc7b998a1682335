"""Doors besides the notebook's: the demonstration, JupyterLab's start, a run as a page."""
