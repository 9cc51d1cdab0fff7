"""Records only: plans, clusters, model shapes, the cutting rule, and the error tree. Imports nothing else of ours."""

__version__ = "0.1.0"
