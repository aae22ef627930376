"""Costs: durations of headers, launches and their delivery on a machine, fitted and predicted."""

from offload.costs.cost_model import CostModel, Prediction, delivery_costs_ns
from offload.costs.header_model import (
    COVERAGE,
    DRIFT,
    STAGES,
    Coefficient,
    HeaderModel,
    HeaderShape,
    Observation,
)
from offload.costs.launch_costs import LaunchCost, LaunchCosts
from offload.costs.signature import signature_of
from offload.costs.store import CostKey, load_cost_model, save_cost_model

__all__ = [
    "COVERAGE",
    "DRIFT",
    "STAGES",
    "Coefficient",
    "CostKey",
    "CostModel",
    "HeaderModel",
    "HeaderShape",
    "LaunchCost",
    "LaunchCosts",
    "Observation",
    "Prediction",
    "delivery_costs_ns",
    "load_cost_model",
    "save_cost_model",
    "signature_of",
]
