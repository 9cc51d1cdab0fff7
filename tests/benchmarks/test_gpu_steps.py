"""Steps beside plain Hugging Face: the same losses, the same updates, torch's varlen call as each release has it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import relative_error
from torch.nn.attention import varlen as torch_varlen

from gpu import loops, tables
from gpu.loops import OurLoop, PlainLoop
from gpu.rows import Records, read_rows
from gpu.setting import TINY, BatchKind, model_config, packs_of, plan_for, step_flops
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.engine.batch import random_batch
from tiers import some

CPU = torch.device("cpu")
LENGTHS = [50, 3, 20, 1, 30]


@pytest.mark.parametrize("recompute", some(["none", "layer"], 0))
@pytest.mark.parametrize("packed", [False, True])
def test_rivals_take_the_same_steps(packed, recompute):
    cost = all_terms_cost(named_shape("tiny"), named_hardware("cpu"))
    cluster = Cluster(ranks=1, capacity_tokens=64)
    plan = plan_for(LENGTHS, cost, cluster, layers=2, recompute=recompute)
    assert {each.recompute for each in plan.microbatches} == {recompute}
    batch = random_batch(LENGTHS, vocab=256)
    ours = OurLoop("tiny", CPU, torch.float32)
    rival = PlainLoop("tiny", CPU, torch.float32, packed=packed, pack_tokens=64)
    for _ in range(3):
        assert rival.step(plan, batch) == pytest.approx(ours.step(plan, batch), rel=1e-5)
    assert relative_error(rival.parameters.values, ours.parameters.values) < 1e-6
    assert rival.model.config._attn_implementation == (loops.VARLEN if packed else "sdpa")


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=40), pack_tokens=st.integers(1, 100))
def test_packs_hold_all_and_no_more_than_asked_unless_alone(lengths, pack_tokens):
    packs = packs_of(lengths, pack_tokens)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(len(pack) == 1 or sum(lengths[index] for index in pack) <= pack_tokens for pack in packs)


@given(name=st.sampled_from(["uniform", "one long", "github", "prolong"]), longest=st.integers(32, 5000))
def test_batches_stay_within_their_longest(name, longest):
    lengths = BatchKind(name=name, tokens=10_000, longest_tokens=longest).lengths()
    assert max(lengths) <= longest
    assert name != "one long" or sorted(lengths)[-1] == longest
    assert lengths == BatchKind(name=name, tokens=10_000, longest_tokens=longest).lengths()


def test_flops_are_six_a_parameter_and_attention():
    config = model_config("tiny")
    parameters = 1000 + config.vocab_size * config.hidden_size
    assert step_flops(config, parameters, [10, 20]) == 6 * 1000 * 30 + 6 * 2 * 4 * 8 * (100 + 400)


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True


def _newest(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return _documents(query, key, value, cu_seq_q, scale, causal=window_size == (-1, 0))


def _without_gqa(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    return _documents(query, key, value, cu_seq_q, scale, causal=window_size == (-1, 0))


def _documents(query, key, value, borders, scale, *, causal):
    assert causal
    rows = [slice(a, b) for a, b in zip(borders.tolist(), borders.tolist()[1:], strict=False)]
    plain = (x.as_subclass(torch.Tensor) for x in (query, key, value))
    q, k, v = plain
    return torch.cat([loops._one_document(q[row], k[row], v[row], scale) for row in rows])


@pytest.mark.parametrize("call", [_newest, _without_gqa])
def test_the_varlen_call_is_that_of_the_release(monkeypatch, call):
    q, k, v = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    options = {"scaling": 0.3, "cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32), "max_length_q": 7}
    wanted, _ = loops._varlen(None, q, k, v, None, **options)
    monkeypatch.setattr(torch_varlen, "varlen_attn", call)
    got, _ = loops._varlen(None, *(x.as_subclass(OnGpu) for x in (q, k, v)), None, **options)
    assert got.shape == (1, 12, 4, 8)
    assert torch.equal(got, wanted)


@pytest.mark.exhaustive
def test_what_does_not_fit_is_said_and_stops_no_other(tmp_path, monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 62.62 GiB.")

    monkeypatch.setattr(PlainLoop, "step", out_of_memory)
    sizes = replace(TINY, device="cpu", step_models={"tiny": TINY.step_models["tiny"][:1]})
    tables.steps(sizes, Records(tmp_path, "steps"))
    rows = read_rows(tmp_path)
    assert [row["loop"] for row in rows if row["table"] == "step"] == ["lengthwise"]
    assert sum("62.62 GiB" in row.get("refused", "") for row in rows) == 4
