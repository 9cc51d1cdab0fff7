"""What holds for every test: one thread, no network, no GPU unless asked for, the same property-based cases everywhere.

With LENGTHWISE_TEST_GPU=1 (`make gpu-check`) GPUs are seen; all other tests are of the CPU, also where there is one.
HYPOTHESIS_PROFILE names the profile of the property-based tests: ci (default), full, or search, whose cases are new
each time. Which share of its cases a test takes is in properties.py; which tests run by default, in tiers.py.
"""

import gc
import os
import shutil
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["LENGTHWISE_CACHE"] = "off"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if not os.environ.get("LENGTHWISE_TEST_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
from hypothesis import HealthCheck, settings

CASES = {"ci": 16, "full": 100, "search": 500}  # by profile: of a property that is neither costly nor costliest
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")

for name, cases in CASES.items():
    settings.register_profile(
        name,
        deadline=None,
        derandomize=name != "search",
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=cases,
    )


def pytest_configure() -> None:
    """Load the profile, and give `datasets` a folder for its copies, before any test module is imported."""
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="lengthwise-tests-")
    if PROFILE not in CASES:
        raise pytest.UsageError(f"HYPOTHESIS_PROFILE: expected one of {', '.join(CASES)}; got {PROFILE!r}")
    settings.load_profile(PROFILE)


def pytest_unconfigure() -> None:
    """Remove what `datasets` copied."""
    shutil.rmtree(os.environ["HF_DATASETS_CACHE"], ignore_errors=True)


def pytest_collection_finish() -> None:
    """Leave what imports made out of collections: each training of a Trainer asks for one, 0.3 s in every rank."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Run torch on one thread: a forked child hangs where its parent ever ran a threaded operation."""
    torch = sys.modules.get("torch")  # not imported for the pure half, which is tested without it, too
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture
def checked_transfers(monkeypatch):
    """Check each message between ranks, in all their processes."""
    monkeypatch.setenv("LENGTHWISE_TRANSPORT_WRAPPER", "testing.checked:checked")


@pytest.fixture(autouse=True)
def _forked_planner(request, monkeypatch):
    """Fork the planner where rank 0 is the process of the tests, too: a new one takes 0.3 s (not in the test of it)."""
    module = sys.modules.get("lengthwise.planner.service.process")
    if module is not None and request.path.stem != "test_planner_service":
        monkeypatch.setattr(module, "_start", module._fork)


@pytest.fixture(autouse=True)
def _no_command_goes_on():
    """End the runs of a test that failed: they would slow down all that follow."""
    yield
    small_runs = sys.modules.get("run.small_runs")
    for command in small_runs.Command.living if small_runs else ():
        command.kill()
