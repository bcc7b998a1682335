"""Entry points other than the notebook, such as the demo, JupyterLab's start and reports."""
