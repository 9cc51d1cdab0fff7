"""Lengthwise trains language models on sequences of very different lengths with Hybrid Data Parallelism.

Importing this package is cheap: nothing heavy (torch, transformers) is loaded until it is used.
"""

__version__ = "0.1.0"
