"""Which path a link takes: a pure function of both sides' facts."""

from syncstack.plan.choose import BEST_FIRST, Choice, choose

__all__ = ["BEST_FIRST", "Choice", "choose"]
