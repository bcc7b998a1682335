"""The costs of computation and communication."""
