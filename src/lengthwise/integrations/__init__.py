"""Planned steps inside trainers of other libraries; one module per library imports it."""
