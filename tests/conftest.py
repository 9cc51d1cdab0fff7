"""What holds for every test: one thread, no network, no GPU unless asked for, the same property-based cases everywhere.

With LENGTHWISE_TEST_GPU=1 (`make gpu-check`) GPUs are seen; all other tests are of the CPU, also where there is one.
With HYPOTHESIS_PROFILE=search every property is tried on five times as many cases as its test asks for, new ones each
time.
"""

import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if not os.environ.get("LENGTHWISE_TEST_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.utils.conventions import not_set

SEARCH_TIMES = 5  # the cases of a test under the search profile, over those it asks for

settings.register_profile(
    "ci", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "search", parent=settings.get_profile("ci"), derandomize=False, max_examples=100 * SEARCH_TIMES
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


class MoreExamples(settings):
    """The `settings` of a test that names its number of examples, which would else not follow the profile."""

    def __init__(self, *arguments: Any, max_examples: Any = not_set, **others: Any) -> None:
        more = max_examples if max_examples is not_set else max_examples * SEARCH_TIMES
        super().__init__(*arguments, max_examples=more, **others)


if os.environ.get("HYPOTHESIS_PROFILE") == "search":  # before any test module imports it
    hypothesis.settings = MoreExamples


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Run torch on one thread: a forked child hangs where its parent ever ran a threaded operation."""
    torch = sys.modules.get("torch")  # not imported for the pure half, which is tested without it, too
    if torch is not None:
        torch.set_num_threads(1)
