"""What holds for every test: one thread, no network, no GPU unless asked for, the same property-based cases everywhere.

With LENGTHWISE_TEST_GPU=1 (`make gpu-check`) GPUs are seen; all other tests are of the CPU, also where there is one.
A property is tried on two fifths of the cases that its test asks for; with HYPOTHESIS_PROFILE=full on all of them, with
HYPOTHESIS_PROFILE=search on five times as many, new ones each time.
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

SHARES = {"ci": 0.4, "full": 1.0, "search": 5.0}  # by profile: the cases of a test, over those it asks for
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")


def _examples(asked: int) -> int:
    return round(asked * SHARES[PROFILE])


settings.register_profile(
    "tests",
    deadline=None,
    derandomize=PROFILE != "search",
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=_examples(100),
)
settings.load_profile("tests")


class ScaledExamples(settings):
    """The `settings` of a test that names its number of examples, which would else not follow the profile."""

    def __init__(self, *arguments: Any, max_examples: Any = not_set, **others: Any) -> None:
        scaled = max_examples if max_examples is not_set else _examples(max_examples)
        super().__init__(*arguments, max_examples=scaled, **others)


hypothesis.settings = ScaledExamples  # before any test module imports it


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Run torch on one thread: a forked child hangs where its parent ever ran a threaded operation."""
    torch = sys.modules.get("torch")  # not imported for the pure half, which is tested without it, too
    if torch is not None:
        torch.set_num_threads(1)
