"""What a session writes: a model that Hugging Face opens."""

import pytest
import torch
from loops import in_ranks, small_model
from transformers import AutoModelForCausalLM

from lengthwise import Session
from lengthwise.core.errors import OutputError


def test_a_model_is_saved_as_hugging_face_opens_it_and_a_path_that_is_a_file_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")

    def work(_rank):
        model = small_model()
        with Session(model, capacity_tokens=64) as session:
            session.save_pretrained(tmp_path / "model")
            with pytest.raises(OutputError, match="expected a folder; got a file"):
                session.save_pretrained(tmp_path / "file")
        return [each.detach().clone() for each in model.parameters()]

    for weights in in_ranks(work, 2, tmp_path):
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
        assert all(map(torch.equal, opened.parameters(), weights))
