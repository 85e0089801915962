"""Rounding rules from fp32 masters to bf16 served weights: one algebra, three back ends, the same bits."""

from .bits import parameter_key
from .entry import cast_, replay_, start_accumulator_
from .rules import DEFAULT, RULES, Rounding, Rule, Runs, get_rule

__all__ = [
    "DEFAULT",
    "RULES",
    "Rounding",
    "Rule",
    "Runs",
    "cast_",
    "get_rule",
    "parameter_key",
    "replay_",
    "start_accumulator_",
]
