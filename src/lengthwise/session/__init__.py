"""Planned steps inside a user's own training loop, with the user's model, optimizer, scheduler and data."""

from lengthwise.session.losses import ComputeLoss, TokenLoss, Tokens, TokenValues, log_probabilities
from lengthwise.session.rows import Row
from lengthwise.session.runner import StepResult
from lengthwise.session.session import Session

__all__ = ["ComputeLoss", "Row", "Session", "StepResult", "TokenLoss", "TokenValues", "Tokens", "log_probabilities"]
