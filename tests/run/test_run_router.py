"""Models with the routers' balance loss: what verify compares with, and what runs tell of it."""

import copy
import sys
from functools import cache

import pytest
import torch
from testing import RecordingTransport, build_pair, make_batch, make_plan, tiny_family_config
from testing.laid import whole_parameters
from testing.order import check_order, rank_groups
from testing.small import VOCAB, make_rows, relative
from testing.strict import StrictWorld
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lengthwise.attention import choose_kernel
from lengthwise.comm import Mesh, SoloTransport
from lengthwise.core.plan import Piece
from lengthwise.core.shape import Cluster
from lengthwise.cost import analytic_cost, named_hardware, shape_from_config
from lengthwise.engine import step as work
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import RouterBalance, check_model_config, coefficient_key, keep_double, token_loss
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.program import last_on_all_ranks, lower_plan
from lengthwise.run import reference, verify
from run.small_runs import read_lines, told, train, write_run

pytestmark = pytest.mark.usefixtures("checked_transfers")

LENGTHS = (1, 57, 2, 3, 40, 1, 5, 7, 31, 11, 13, 8)
COEFFICIENT = 0.5  # large, so that an error in the balance loss is one in the gradient


@cache
def pair(family):
    """The planned and the plain model."""
    config = tiny_family_config(family)
    config.output_router_logits = True
    setattr(config, coefficient_key(family), COEFFICIENT)
    experts = "num_local_experts" if "num_local_experts" in config.to_dict() else "num_experts"
    setattr(config, experts, 5)  # a number that fp32 cannot divide by exactly
    check_model_config(config)
    return build_pair(family, config)


def one_process(family, batch):
    """(loss, balance loss, gradients) of plain Hugging Face: every document's graph is kept, and its own function
    takes the router logits of all of them as one."""
    model = copy.deepcopy(pair(family)["plain"])
    flat = whole_parameters(model, SoloTransport(), dtype=torch.float64)
    with keep_double(torch.float64):
        total, heard = 0.0, []
        for index in range(len(batch.ids)):
            ids, labels = batch.whole(index)
            output = model(input_ids=ids[None], use_cache=False)
            total = total + token_loss(output.logits[0], labels)
            heard.append(output.router_logits)
        balance = sys.modules[type(model).__module__].load_balancing_loss_func(
            tuple(torch.cat(layer) for layer in zip(*heard, strict=True)), model.num_experts, model.num_experts_per_tok
        )
        (total / batch.loss_tokens + COEFFICIENT * balance).backward()
    flat.reduce_gradients()
    return total.item() / batch.loss_tokens, balance.item(), flat.gather_gradients()


@pytest.mark.parametrize("family", ["qwen3_moe", "jetmoe"])  # jetmoe lists the logits of a router twice
def test_reference_of_verify_equals_one_graph_of_all_documents(family):
    batch = make_batch(LENGTHS, vocab=48, seed=1, masked=0.2)
    found = reference.plain_gradients(copy.deepcopy(pair(family)["plain"]), batch.dataset, batch.ids, torch.float64)
    loss, balance, gradients = one_process(family, batch)
    assert max(relative(found.loss, loss), relative(found.router_loss, balance)) <= 1e-13
    assert all(each <= 1e-12 for each in verify.gradient_differences(found.gradients, gradients).values())


def test_order_real_calls_are_those_of_the_checked_order():
    """Counting: ring rounds, one sum; then the kept graph's backward, then the rest. In evaluation the sum is last."""
    cost = analytic_cost(shape_from_config(pair("olmoe")["plain"].config.to_dict()), named_hardware("cpu"))
    cluster = Cluster(ranks=3, capacity_tokens=-(-max(LENGTHS) // 3) + 1)
    plan, batch = plan_step(LENGTHS, cluster, cost, PlanOptions(layers=2)), make_batch(LENGTHS, vocab=48)
    kept = last_on_all_ranks(plan)
    assert 0 < len(kept) < len(plan.microbatches)
    assert check_order(plan, layers=2, counts_routers=True) > 0

    def called(inner, train):
        transport = RecordingTransport(inner)
        model = copy.deepcopy(pair("olmoe")["planned"])
        kernel = choose_kernel(torch.device("cpu"))
        done = run_part(plan, batch, StepContext(model, Mesh(transport, 1), kernel, name="step", train=train))
        return [(call.name, call.phase) for call in transport.calls], done.router_loss

    trained, evaluated = (StrictWorld(3).run(lambda t, train=train: called(t, train)) for train in (True, False))
    for rank, (calls, _) in enumerate(trained):
        numbers = {program.index: number for number, program in enumerate(lower_plan(plan, rank), start=1)}
        expected = []
        for label, operations in list(rank_groups(plan, rank, windows=[None] * 2, counts_routers=True))[:-1]:
            if operations[0].kind == "collective":
                expected.append(("all_reduce", "step, sum of the routers' counts"))
                continue
            microbatch, _, kind, _ = label.split(", ")
            number = numbers[int(microbatch.removeprefix("microbatch "))]
            expected.append(("exchange", f"step, microbatch {number} of {len(numbers)} {kind}"))
        assert calls == expected
    for calls, _ in evaluated:
        assert all(name == "exchange" and phase.endswith("forward") for name, phase in calls[:-1])
        assert calls[-1] == ("all_reduce", "step, sum of the routers' counts")
    found, expected = (sum(loss for _, loss in each) for each in (evaluated, trained))
    assert found == pytest.approx(expected, rel=1e-6)
    assert found > 0


def test_routers_are_counted_by_the_logits_of_the_forward_under_autocast(monkeypatch):
    plan = make_plan(1, (9, 7), [Piece(ranks=(0,), sequences=(i,)) for i in (0, 1)])
    counted, weighed = [], []
    count, share = work.count_choices, RouterBalance.share
    monkeypatch.setattr(work, "count_choices", lambda *given: counted.extend(given[1]) or count(*given))
    monkeypatch.setattr(RouterBalance, "share", lambda *given: weighed.extend(given[1]) or share(*given))
    model, kernel = copy.deepcopy(pair("olmoe")["planned"]), choose_kernel(torch.device("cpu"))
    context = StepContext(model, Mesh(SoloTransport(), 1), kernel, name="test", autocast=torch.bfloat16)
    run_part(plan, make_batch((9, 7), vocab=48), context)
    first, kept = counted[:2], counted[2:]  # of two layers
    assert len(weighed) == 4
    assert all(map(torch.equal, weighed, [*kept, *first]))


@pytest.fixture
def run_file(tmp_path):
    """A run of a Qwen3-MoE whose second layer is dense."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24,
        mlp_only_layers=[1], output_router_logits=True, router_aux_loss_coef=0.3, tie_word_embeddings=False,
        max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.data.mul_(20 if "gate.weight" in name else 3 if parameter.dim() > 1 else 1)
    model.save_pretrained(tmp_path / "model")
    rows = make_rows([30, 1, 12, 5, 61, 2, 44, 3, 17])
    return write_run(tmp_path, rows, global_batch={"sequences": 6}, optimizer={"lr": 1e-3})


def test_train_writes_router_loss_beside_loss_and_evaluation_has_none(run_file):
    evaluated = 'eval={"data": [{"path": "train.jsonl"}], "every_steps": 1}'
    output = train(run_file, "--ranks", 2, "--set", "steps=1", evaluated)
    for row in read_lines(output / "metrics.jsonl"):
        assert row["router_loss"] > 2, "balanced routers have 2: each row chooses two experts"
    [row] = read_lines(output / "eval.jsonl")
    assert "router_loss" not in row


@pytest.mark.exhaustive
def test_verify_tells_the_router_loss_and_fails_where_it_is_wrong(run_file, capsys, monkeypatch):
    out = told(capsys, "verify", run_file, "--ranks", 2)
    assert "router loss: 2." in out
    assert "PASS" in out
    share = work.RouterBalance.share
    monkeypatch.setattr(work.RouterBalance, "share", lambda self, logits: share(self, logits).detach())
    assert "FAIL" in told(capsys, "verify", run_file, "--ranks", 2, status=1)
