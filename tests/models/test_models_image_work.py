"""The work of a tower on an image, as plans count it, beside the FLOPs that torch counts."""

import numpy as np
import pytest
import torch
from testing.images import TEXTS, image_model, image_rows
from torch.utils.flop_counter import FlopCounterMode

from lengthwise.cost import shape_from_config
from lengthwise.models import image_reader, text_part
from tiers import some


@pytest.mark.parametrize("family", some(TEXTS, 2, -2))
@pytest.mark.parametrize("trains", [True, False, None])
def test_the_work_on_an_image_is_near_its_flops_in_tokens_of_the_decoder(family, trains):
    """Near, because towers this small convolve as much as they multiply; within a tenth for Qwen3-VL's sizes.

    trains: None for a tower that requires gradients, but is not in the optimizer.
    """
    model = image_model(family, torch.float32)
    model.set_attn_implementation("eager")
    model.requires_grad_(True)
    if trains is False:
        for part in model.model.children():
            part.requires_grad_(part is model.get_decoder())
    trained = {id(each) for each in model.parameters()} if trains is not None else ()
    reader = image_reader(text_part(model, trained=trained))
    of_token, found, expected = 6 * shape_from_config(model.config.to_dict()).linear_params, [], []
    for grid in ((4, 4), (8, 8)):
        (row,) = image_rows(model, [[2, grid, 3]])
        ids, given = row["input_ids"].numpy().astype(np.int32), {name: row[name] for name in reader.columns}
        images = reader.read(ids, given, "")
        with torch.no_grad(), FlopCounterMode(display=False) as counted:
            model.model.get_image_features(**images.inputs(0), return_dict=True)
        ((first, work),) = reader.work(images)
        assert first == images.places[0]
        found.append(work)
        expected.append(counted.get_total_flops() * (3 if trains else 1) / of_token)
    assert found == pytest.approx(expected, rel=0.5)
    assert found[1] / found[0] == pytest.approx(expected[1] / expected[0], rel=0.25), "attention among patches"
