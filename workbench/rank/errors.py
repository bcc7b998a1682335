"""The error of a strategy or a compressor."""


class StrategyError(RuntimeError):
    """A strategy or compressor requested something invalid."""
