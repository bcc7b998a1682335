"""Entry points other than the notebook: the demo, JupyterLab's start, reports and subcommands."""
