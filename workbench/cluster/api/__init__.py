"""What `workbench.Lab` is made of."""
