"""A model's shape, read from its config without torch, has the parameters of the model that transformers builds."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lengthwise.core.trained import FAMILIES
from lengthwise.cost import shape_from_config
from tiers import more

OWN_PATHS = ("nemotron_h", "gemma4_text", "qwen3_next", "gpt2")  # a way of configs each
NOT_BUILT = {  # whose default config gives no model, or not the published one
    "deepseek_v2": "says no experts per token",
    "dots1": "says no experts",
    "hunyuan_v1_dense": "says no head size",
    "hunyuan_v1_moe": "says no head size",
    "lfm2_moe": "says no kinds of layers",
    "ministral": "says no head size",
    "longcat_flash": "transformers makes weights of experts that compute nothing",
    "hrm_text": "runs its layers several times, as shapes count them",
    "jetmoe": "has experts in attention, of which shapes count one",
}


@pytest.mark.parametrize(
    "family", [*OWN_PATHS, *(more(name) for name in FAMILIES if name not in {*OWN_PATHS, *NOT_BUILT})]
)
def test_a_shape_has_the_parameters_of_its_familys_model(family: str) -> None:
    """Within 1.5 %: norms, biases, routers and positions are not counted."""
    config = AutoConfig.for_model(family).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    head = model.get_output_embeddings().weight
    parameters += head.numel() * (head is model.get_input_embeddings().weight)  # a shape counts it twice
    assert shape_from_config(config.to_dict()).total_params == pytest.approx(parameters, rel=0.015)
