"""Schedules of ranks that do not run freely: lock-step waves, and ranks that are pipelines."""
