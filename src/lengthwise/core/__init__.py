"""Records (plans, clusters, model shapes), the cutting rule, files and the error tree. Imports no package of ours."""

__version__ = "0.2.0"
