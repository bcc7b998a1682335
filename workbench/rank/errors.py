"""The error of a strategy or a compressor, and a text that several places raise it with."""


class StrategyError(RuntimeError):
    """A strategy or compressor requested something invalid. On real ranks it arrives as a RankError.

    What to do: correct the call that the message names in the strategy's or the compressor's code.
    """


def explain_missing_forward(micro: int) -> str:
    """Returns the error's text for a backward without an open forward."""
    return f"the backward of micro-batch {micro} has no open forward: await rank.forward(micro={micro}) before it"
