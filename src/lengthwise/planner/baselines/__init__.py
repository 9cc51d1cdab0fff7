"""Planners that others use, each implemented in its favour, for comparison."""
