"""The device of each test here: the GPU where there is one, and the CPU, so that the bodies are proven without one.

Under `make gpu-check` (LENGTHWISE_TEST_GPU) nothing is skipped in silence: a test that is skipped there has failed.
"""

import os

import pytest
import torch

ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU (make gpu-check)")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def device(request):
    return torch.device(request.param)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.skipped and os.environ.get("LENGTHWISE_TEST_GPU"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, where every case must run: {report.longrepr[-1]}"
    return report
