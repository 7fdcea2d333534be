"""Mixture of experts of Qwen3.5/3.6: routed experts by top-k, and one shared expert that sees every token."""

from .decode import experts_down, experts_gate_up, join_routing, split_routing
from .prefill import combine, combine_norm, grouped_down, grouped_gate_up
from .routing import Routing, route
from .weights import ExpertWeights

__all__ = [
    "ExpertWeights",
    "Routing",
    "combine",
    "combine_norm",
    "experts_down",
    "experts_gate_up",
    "grouped_down",
    "grouped_gate_up",
    "join_routing",
    "route",
    "split_routing",
]
