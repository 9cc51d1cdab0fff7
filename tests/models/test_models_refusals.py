"""What a plan would compute wrongly is refused by its name, before or at the first layer, never trained on."""

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, Gemma2Config, Gemma3TextConfig, GPT2Config, LlamaConfig, MixtralConfig

from lengthwise.attention import PlannedAttention, ReferenceKernel
from lengthwise.comm import SoloTransport
from lengthwise.core.errors import ConfigError, LengthwiseError, ModelRefused, Problems
from lengthwise.core.plan import Piece
from lengthwise.models import ModelSource, build_model, check_model_config, find_model, model_loss
from lengthwise.program import lower_plan
from lengthwise.testing import make_batch, make_plan

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}


def one_rank(lengths=(5,), config=None):
    """Return (model, planned, tensors) of one microbatch on one rank."""
    plan = make_plan(1, lengths, [Piece(ranks=(0,), sequences=tuple(range(len(lengths))))])
    program = lower_plan(plan, 0)[0]
    source = ModelSource(name="t", config=config or LlamaConfig(**SIZES), weights=False)
    planned = PlannedAttention(program, SoloTransport(), ReferenceKernel())
    return build_model(source, seed=0), planned, make_batch(lengths, vocab=32).tensors(program.segments(0))


def attend(**arguments):
    """Call the registered attention function as a model would, with one token of one head."""
    _, planned, _ = one_rank((1,))
    q = torch.zeros(1, 1, 1, 4)
    return AttentionInterface()["lengthwise"](
        nn.Module(), q, q, q, **{"attention_mask": None, "lengthwise": planned, **arguments}
    )


@pytest.mark.parametrize("config", [GPT2Config(), Gemma2Config()], ids=lambda config: config.model_type)
def test_unknown_families_are_refused_by_name(config):
    with pytest.raises(LengthwiseError, match=rf"model_type: expected .*llama.*; got {config.model_type}"):
        check_model_config(config)


def test_dropout_is_refused_by_its_key():
    with pytest.raises(ModelRefused, match=r"attention_dropout.*0\.1.*Set attention_dropout to 0"):
        check_model_config(LlamaConfig(**SIZES, attention_dropout=0.1))
    for key in ("hidden_dropout", "resid_pdrop", "embd_pdrop"):
        with pytest.raises(ModelRefused, match=key):
            check_model_config(LlamaConfig(**SIZES, **{key: 0.2}))
    check_model_config(LlamaConfig(**SIZES, attention_dropout=0.0))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 2.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_that_depends_on_the_length_at_hand_is_refused(rope):
    config = LlamaConfig(**SIZES)
    config.rope_parameters = {**rope, "original_max_position_embeddings": 32}
    with pytest.raises(ModelRefused, match=f"rope_type.*{rope['rope_type']}"):
        check_model_config(config)


def test_rope_scaling_of_older_configs_is_seen():
    with pytest.raises(ModelRefused, match=r"rope_type.*dynamic"):
        check_model_config(LlamaConfig(**SIZES, rope_scaling={"type": "dynamic", "factor": 2.0}))


def test_rope_kinds_of_layers_are_all_seen():
    config = Gemma3TextConfig(**SIZES, layer_types=["sliding_attention", "full_attention"])
    check_model_config(config)
    config.rope_parameters["full_attention"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelRefused, match=r"full_attention\.rope_type.*dynamic"):
        check_model_config(config)


def test_layers_of_another_kind_are_refused():
    config = LlamaConfig(**SIZES)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelRefused, match=r"layer_types.*got linear_attention"):
        check_model_config(config)


def test_what_is_drawn_at_random_in_training_is_refused():
    with pytest.raises(ModelRefused, match="router_jitter_noise"):
        check_model_config(MixtralConfig(**SIZES, router_jitter_noise=0.1))


def test_bidirectional_attention_is_refused_before_a_process_starts():
    with pytest.raises(ModelRefused, match="bidirectional"):
        check_model_config(Gemma3TextConfig(**SIZES, use_bidirectional_attention=True))


def test_config_that_is_not_causal_is_refused():
    """Hugging Face then makes a mask that shows everything; ours would go on hiding what comes after."""
    with pytest.raises(ModelRefused, match="is_causal"):
        check_model_config(LlamaConfig(**SIZES, is_causal=False))


def test_all_reasons_are_told_at_once():
    config = LlamaConfig(**SIZES, output_router_logits=True, attention_dropout=0.5)
    with pytest.raises(Problems) as raised:
        check_model_config(config)
    assert len(raised.value.problems) == 2
    assert raised.value.exit_status == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"softcap": 50.0}, "softcap=50"),
        ({"sinks": torch.zeros(1)}, "sinks="),
        ({"something_new": 1}, "something_new=1"),
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "attention_mask=a tensor"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "is_causal=False"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"lengthwise": None}, "called outside a plan"),
    ],
)
def test_attention_arguments_not_handled_are_refused_by_name(arguments, named):
    with pytest.raises(ModelRefused, match=named):
        attend(**arguments)


def test_attention_arguments_without_effect_pass():
    out, weights = attend(
        softcap=None, s_aux=None, sliding_window=1, position_ids=torch.zeros(1, 1), use_cache=False, is_causal=True
    )
    assert out.shape == (1, 1, 1, 4)
    assert weights is None


def test_attention_of_values_of_another_size_is_refused():
    _, planned, _ = one_rank((1,))
    q, v = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 6)
    with pytest.raises(ModelRefused, match="value head size=6 beside 4"):
        AttentionInterface()["lengthwise"](nn.Module(), q, q, v, None, lengthwise=planned)


def test_attention_of_a_bidirectional_layer_is_refused():
    _, planned, _ = one_rank((1,))
    layer, q = nn.Module(), torch.zeros(1, 1, 1, 4)
    layer.is_causal = False
    with pytest.raises(ModelRefused, match="is_causal=False"):
        AttentionInterface()["lengthwise"](layer, q, q, q, None, lengthwise=planned)


def test_model_called_outside_a_plan_is_refused():
    model, _, (ids, _, _) = one_rank()
    with pytest.raises(ModelRefused, match="the model was called outside a plan"):
        model(input_ids=ids[None], use_cache=False)


@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1)])
def test_layer_that_does_not_attend_through_the_plan_is_counted(layers):
    class Elsewhere(nn.Module):
        def forward(self, hidden_states, **_):
            return hidden_states, None

    model, planned, tensors = one_rank()
    for layer in layers:
        model.model.layers[layer].self_attn = Elsewhere()
    with pytest.raises(ModelRefused, match=f"all 2 layers.*got {2 - len(layers)} that did"):
        model_loss(model, planned, *tensors)


def test_model_that_cannot_be_found_is_told_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{")
    for name in (str(tmp_path / "nowhere"), str(tmp_path), "no-such-owner/no-such-model"):
        with pytest.raises(ConfigError) as raised:
            find_model(name)
        assert "\n" not in str(raised.value)
