"""Runs of tests plan in forked processes."""

from training.forked_planner import planner_of_runs

__all__ = ["planner_of_runs"]
