"""A session in stages of a pipeline gives what the plain loop gives; what stages do not run with is refused by name."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from loops import both_loops, in_double, in_ranks, loss_tokens, plain_loop, planned_loop, rows_of, small_model, steps_of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from testing.tiny import tiny_family_config
from transformers import AutoModelForCausalLM

from lengthwise import Session
from lengthwise.comm import SoloTransport
from lengthwise.core.errors import LengthwiseError, ModelRefused
from lengthwise.models import keep_double
from lengthwise.session import engine
from lengthwise.session.stages import cut_stages
from tiers import more

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1)
CONSTANT = partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)
LAYERS = {"num_hidden_layers": 4}


pytestmark = pytest.mark.usefixtures("checked_transfers")


@pytest.mark.parametrize(
    ("ranks", "cut", "tied", "dtype"),
    [
        (4, {"stages": 2, "virtual": 2}, True, torch.float64),
        more(2, {"stages": 2}, False, torch.float64),
        more(3, {"stages": 3}, True, torch.float64),
        more(6, {"stages": 2}, True, torch.float64),
        more(4, {"stages": 2}, True, torch.float32),
    ],
)
def test_a_planned_loop_in_stages_is_the_plain_loop(ranks, cut, tied, dtype, tmp_path):
    def work(_rank):
        model = small_model(dtype, tie_word_embeddings=tied, **LAYERS)
        return both_loops(ADAMW, model=model, dtype=dtype, capacity=128, **cut)

    bars = (1e-13, 1e-12, 1e-11) if dtype == torch.float64 else (1e-5, 1e-4, 1e-3)
    for found in in_ranks(in_double(work), ranks, tmp_path):
        assert all(got < bar for got, bar in zip(found, bars, strict=True))


def test_every_loss_of_a_session_is_exact_in_stages(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "logits_at_once", lambda words, **_: 7 * words)

    def squares(output, tokens):
        each = F.cross_entropy(output.logits[0], tokens.shift_labels, ignore_index=-100, reduction="none")
        return each.square().sum()

    def share(model, inputs, divisor):
        return model(**inputs, num_items_in_batch=divisor).loss

    def work(_rank, **options):
        rows = rows_of([97, 2, 1, 40, 64], 5)
        divisor, model = float(loss_tokens(rows)), small_model(**LAYERS)
        with Session(model, SGD(model.parameters()), capacity_tokens=128, **options) as session:
            results = [
                session.backward(rows),
                session.backward(rows),  # added to the gradients of the first
            ]
            session.optimizer.zero_grad()
            results.append(session.backward(rows, loss=squares))
            session.optimizer.zero_grad()
            results.append(session.backward(rows, compute_loss=partial(share, divisor=divisor)))
            session.optimizer.zero_grad()
            results.append(session.backward_by_sequence(rows, combine=lambda sums: sums.square().mean()))
            results.append(session.evaluate(rows))
            with pytest.raises(ModelRefused, match="model in stages") if options else nullcontext():
                model(input_ids=rows[0]["input_ids"][None])
            with pytest.raises(ModelRefused, match="copy of a rank's part") if options else nullcontext():
                copy.deepcopy(model)
            numbers = [[each.loss, each.grad_norm or 0.0] for each in results]
            return numbers, [each.tolist() for each in session.token_values(rows)]

    (whole,) = in_ranks(in_double(work), 1, tmp_path)
    for staged in in_ranks(in_double(partial(work, stages=2)), 4, tmp_path):
        for got, wanted in zip(staged[0], whole[0], strict=True):
            assert got == pytest.approx(wanted, rel=1e-12)
        for got, wanted in zip(staged[1], whole[1], strict=True):
            assert got == pytest.approx(wanted, rel=1e-12, abs=1e-14)


def test_a_loop_goes_on_from_its_state_in_other_stages_and_in_plain(tmp_path):
    steps = steps_of()[:2]

    def first(rank):
        model = small_model(tie_word_embeddings=True, **LAYERS)
        optimizer = ADAMW(model.parameters())
        with Session(model, optimizer, capacity_tokens=128, stages=2, virtual=2) as session:
            planned_loop(session, optimizer, CONSTANT(optimizer), steps[:1])
            state = copy.deepcopy(session.state_dict())
            planned_loop(session, optimizer, CONSTANT(optimizer), steps[1:])
            session.save_pretrained(tmp_path / "saved")
        return state

    state, *others = in_ranks(in_double(first), 4, tmp_path)
    assert others == [{}] * 3
    end = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64).state_dict()

    def second(rank):
        model = small_model(tie_word_embeddings=True, **LAYERS)
        optimizer = ADAMW(model.parameters())
        with Session(model, optimizer, capacity_tokens=128, stages=2) as session:
            session.load_state_dict(state if rank == 0 else None)
            assert session.steps == 1
            planned_loop(session, optimizer, CONSTANT(optimizer), steps[1:])
            return session.state_dict().get("master_weights")

    def differs(weights):
        return max(((weights[name] - end[name]).norm() / end[name].norm()).item() for name in weights)

    assert differs(in_ranks(in_double(second), 2, tmp_path)[0]) < 1e-11
    plain = small_model(tie_word_embeddings=True, **LAYERS)
    plain.load_state_dict(state["master_weights"], strict=False)
    optimizer = ADAMW(plain.parameters())
    optimizer.load_state_dict(state["optimizer"])
    with keep_double(torch.float64):
        plain_loop(plain, optimizer, CONSTANT(optimizer), steps[1:])
    assert differs(dict(plain.named_parameters())) < 1e-11


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # peft reads it
def test_adapters_of_peft_in_stages_are_those_of_one_rank_and_saved_alone(tmp_path):
    def work(_rank, **options):
        torch.manual_seed(1)
        config = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(small_model(**LAYERS), config)
        optimizer = ADAMW([each for each in model.parameters() if each.requires_grad])
        with Session(model, optimizer, capacity_tokens=256, **options) as session:
            found = planned_loop(session, optimizer, CONSTANT(optimizer), steps_of()[:2])
            session.save_pretrained(tmp_path / f"adapters{len(options)}")
        return found

    staged = in_ranks(in_double(partial(work, stages=2)), 2, tmp_path)
    (whole,) = in_ranks(in_double(work), 1, tmp_path)
    for found in staged:
        assert found == [pytest.approx(each, rel=1e-12) for each in whole]
    saved, wanted = (load_file(tmp_path / f"adapters{n}" / "adapter_model.safetensors") for n in (1, 0))
    assert saved.keys() == wanted.keys()
    assert all(torch.allclose(saved[name], wanted[name], rtol=1e-10, atol=1e-12) for name in wanted)


def test_mixed_precision_in_stages_stays_within_rounding(tmp_path):
    def work(_rank):
        model = small_model(torch.float32, **LAYERS)
        return both_loops(
            SGD, dtype=torch.float32, precision="bf16", capacity=128, model=model, steps=steps_of()[:2], stages=2
        )

    for loss, norm, weights in in_ranks(work, 2, tmp_path):
        assert loss < 1e-2
        assert norm < 5e-2
        assert weights < 1e-2


def test_what_stages_do_not_run_with_is_refused_by_name():
    model = small_model(**LAYERS)
    for options, word in (
        ({"stages": 3, "virtual": 2}, "stages: expected stages x virtual of at most the 4 layers; got 3 x 2"),
        ({"stages": 2}, "ranks: expected a multiple of the 2 stages; got 1"),
    ):
        with pytest.raises(LengthwiseError) as refused:
            Session(model, SGD(model.parameters()), capacity_tokens=64, **options)
        assert word in str(refused.value)


def test_layers_are_cut_by_what_each_of_them_takes():
    kinds = ["full_attention", "linear_attention", "linear_attention", *["mlp"] * 5]
    config = tiny_family_config("nemotron_h", {"layer_types": kinds, "vocab_size": 8})
    cut = cut_stages(SoloTransport(), config, 2, [64], capacity=64, cost=None)
    assert cut == [range(3), range(3, 8)]


def test_stages_of_models_that_differ_are_refused(tmp_path):
    def work(rank):
        model = small_model(**LAYERS)
        with torch.no_grad():
            model.model.layers[3].mlp.up_proj.weight[0, 0] += rank
        with pytest.raises(LengthwiseError, match="got models that differ"):
            Session(model, SGD(model.parameters()), capacity_tokens=64, stages=2)

    in_ranks(work, 2, tmp_path)


def test_a_stage_saves_no_part_of_a_model_as_if_it_were_whole(tmp_path):
    def work(_rank):
        model = small_model(**LAYERS)
        with Session(model, SGD(model.parameters()), capacity_tokens=64, stages=2) as session:
            for call in (partial(model.save_pretrained, tmp_path / "half"), model.state_dict):
                with pytest.raises(ModelRefused, match="lie over the ranks"):
                    call()
            session.save_pretrained(tmp_path / "whole")

    in_ranks(work, 2, tmp_path)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not info["missing_keys"]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # peft reads it
def test_the_state_of_adapters_has_the_names_of_the_users_model_and_loads_from_others(tmp_path):
    def work(_rank):
        torch.manual_seed(1)
        config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(small_model(**LAYERS), config)
        names = {name for name, each in model.named_parameters() if each.requires_grad}
        optimizer = SGD([each for each in model.parameters() if each.requires_grad])
        with Session(model, optimizer, capacity_tokens=256, stages=2) as session:
            state = session.state_dict()
            assert session.rank or state["master_weights"].keys() == names
            inside = {
                name.removeprefix("base_model.model."): each for name, each in state.get("master_weights", {}).items()
            }
            session.load_state_dict({**state, "master_weights": {name: each + 1 for name, each in inside.items()}})
            again = session.state_dict().get("master_weights", {})
        assert all(torch.equal(again[name], each + 1) for name, each in state.get("master_weights", {}).items())

    in_ranks(work, 2, tmp_path)
