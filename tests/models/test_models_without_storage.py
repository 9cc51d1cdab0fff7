"""Models of ranks other than 0: no parameter is read, drawn or stored until rank 0's arrive; all else is there."""

import copy

import pytest
import torch
from testing import MODEL_TYPES, SIZES, tiny_family_config
from testing.laid import whole_parameters
from testing.strict import StrictWorld
from transformers import AutoModelForCausalLM, LlamaConfig

from lengthwise.models import FAMILIES, ModelSource, build_model, find_model, wrapped_layers
from tiers import some

CPU = torch.device("cpu")


def tensors_beside_parameters(model):
    """Map where a tensor is that is no parameter to it: buffers, and attributes that nobody registered."""
    every = [(path, {**each.__dict__, **each._buffers}) for path, each in model.named_modules()]
    named = [(f"{path}.{name}", value) for path, values in every for name, value in values.items()]
    return {name: value for name, value in named if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("model_type", some([name for name in FAMILIES if name in MODEL_TYPES]))
def test_all_but_parameters_is_that_of_any_other_build(model_type):
    source = ModelSource(name=model_type, config=tiny_family_config(model_type), weights=False)
    stored, without = (build_model(source, seed=0, stored=stored) for stored in (True, False))
    assert all(each.is_meta for each in without.parameters())
    named, others = (
        {name: (each.shape, each.requires_grad) for name, each in model.named_parameters()}
        for model in (stored, without)
    )
    assert named == others, "tied ones are one"
    wanted, found = tensors_beside_parameters(stored), tensors_beside_parameters(without)
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert not found[name].is_meta, name
        assert torch.equal(found[name], value), name
    assert len(wrapped_layers(stored)) == len(wrapped_layers(without))


def test_only_rank_0_opens_weights(tmp_path, monkeypatch):
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(copy.deepcopy(config)).save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    read, opened = build_model(source, seed=0), []
    real = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: opened.append(a) or real(*a, **k))
    empty = [build_model(source, seed=rank, stored=rank == 0) for rank in range(3)]
    assert len(opened) == 1
    for rank, model in enumerate(empty):  # buffers may be weights
        model.register_buffer("own", torch.tensor(rank, dtype=torch.float64), persistent=False)

    def work(transport):
        model = empty[transport.rank]
        whole_parameters(model, transport, dtype=torch.float32, device=CPU, layers=wrapped_layers(model))
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.own == 0
        return model.state_dict()

    for state in StrictWorld(3).run(work):
        assert state.keys() == read.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in read.state_dict().items())
