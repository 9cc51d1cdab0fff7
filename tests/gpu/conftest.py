"""The device of each test here: the GPU where there is one, and the CPU, so that the bodies are proven without one."""

import pytest
import torch

ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU (make gpu-check)")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def device(request):
    return torch.device(request.param)
