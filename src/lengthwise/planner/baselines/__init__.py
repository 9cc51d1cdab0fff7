"""Planners that others use, each read in its own favour, and exact programs for small steps: what ours meets."""
