"""Files to sequences to batches: sources are read and checked once, then every step's ids follow from lengths and seed.

After the config and before the planner on the way of the data. numpy only; transformers comes in when a text row needs
its tokenizer, torch never.
"""

from lengthwise.data.dataset import NO_LOSS, Dataset
from lengthwise.data.load import load_dataset
from lengthwise.data.sampler import Batches
from lengthwise.data.survey import check_fits, check_positions
from lengthwise.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "NO_LOSS",
    "Batches",
    "ByteTokenizer",
    "Dataset",
    "Tokenizer",
    "check_fits",
    "check_positions",
    "load_dataset",
    "load_tokenizer",
]
