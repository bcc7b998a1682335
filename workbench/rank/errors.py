"""The error of a strategy or a compressor."""


class StrategyError(RuntimeError):
    """A strategy or compressor requested something invalid. On real ranks it arrives as a RankError.

    What to do: correct the call that the message names in the strategy's or the compressor's code.
    """
