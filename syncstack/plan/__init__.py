"""Which path a link takes: a pure function of both sides' hellos."""

from syncstack.plan.choose import Row, choose, choose_common, explain
from syncstack.plan.gpu import check_devices
from syncstack.plan.model import BEST_FIRST, Choice, FdWay, Policy, Refused, Unmet

__all__ = [
    "BEST_FIRST",
    "Choice",
    "FdWay",
    "Policy",
    "Refused",
    "Row",
    "Unmet",
    "check_devices",
    "choose",
    "choose_common",
    "explain",
]
