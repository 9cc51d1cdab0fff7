"""A folder with the small model of TRL's tests."""

import pytest
import torch
from preferences import model


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Return a folder with the model: TRL loads the reference from where the model came from."""
    folder = tmp_path_factory.mktemp("model")
    model(torch.float64).save_pretrained(folder)
    return folder
