"""A planned step in somebody's loop gives what the plain loop gives, whatever the loop does."""

import copy
import gc
import os
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from loops import ADAMW, CONSTANT, SGD, both_loops, in_double, in_ranks, planned_loop, said
from peft import LoraConfig, get_peft_model
from testing.saved import whole_state
from testing.small import loss_tokens, plain_loop, plain_loss, rows_of, small_model, steps_of

from lengthwise import Session
from lengthwise.core.errors import LengthwiseError, MemoryShortage
from lengthwise.models import keep_double
from lengthwise.session import capacity as room
from lengthwise.session.model import can_share_prefixes
from run.small_runs import call, children
from tiers import more

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # peft reads it
def test_measuring_for_evaluations_alone_leaves_the_model_as_it_was():
    """Also one with adapters of the embedding."""
    config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 5, 9])
    model = get_peft_model(small_model(torch.float32), config).eval()
    trained = [each.requires_grad for each in model.parameters()]
    with torch.no_grad(), Session(model) as session:  # as loops evaluate
        session.evaluate([[1, 2, 3]])
        assert session.capacity_tokens >= 128
    assert [each.requires_grad for each in model.parameters()] == trained
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.training for module in model.modules())


def test_a_session_that_does_not_fit_or_that_nobody_closed_leaves_no_process(monkeypatch):
    model, before = small_model(), children(os.getpid())
    session = Session(model, SGD(model.parameters()), capacity_tokens=128)
    session.backward([[1, 2, 3]])
    assert children(os.getpid()) != before
    del session
    gc.collect()
    assert children(os.getpid()) == before
    monkeypatch.setattr(room, "free_bytes", lambda *_: 1000.0)
    model = small_model()
    with pytest.raises(MemoryShortage) as caught:
        Session(model, SGD(model.parameters()), recompute="none")
    assert caught.value.__traceback__ is not None, "which keeps the session"
    assert children(os.getpid()) == before


def test_measuring_counts_weights_that_are_cast(monkeypatch):
    """In each of the passes whose difference gives the bytes a token."""
    monkeypatch.setattr(room, "free_bytes", lambda *_: 120e6)
    found = []
    for precision in (None, "bf16"):
        model = small_model(torch.float32, hidden_size=256, intermediate_size=512, vocab_size=512)
        with Session(model, SGD(model.parameters()), recompute="none", precision=precision) as session:
            found.append(session.capacity_tokens)
    assert found[0] < found[1] < 2.5 * found[0]


def in_groups(parameters):
    """AdamW as many loops have it: vectors first, without decay, slower."""
    every = list(parameters)
    vectors = {"params": [each for each in every if each.dim() < 2], "weight_decay": 0.0, "lr": 3e-3}
    return ADAMW([vectors, {"params": [each for each in every if each.dim() >= 2]}])


OPTIMIZERS = {
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3), "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "nadam": partial(torch.optim.NAdam, lr=1e-3), "adamax": partial(torch.optim.Adamax, lr=1e-3),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0), "rprop": partial(torch.optim.Rprop, lr=1e-3),
    "asgd": partial(torch.optim.ASGD, lr=1e-2), "groups": in_groups,
}  # fmt: skip


@pytest.mark.exhaustive
def test_every_optimizer_by_entry_is_itself(tmp_path):
    work = in_double(lambda _rank: {name: both_loops(make) for name, make in OPTIMIZERS.items()})
    for found in in_ranks(work, 2, tmp_path):
        assert {name: loss for name, (loss, _, _) in found.items() if loss > 1e-12} == {}
        assert {name: weights for name, (_, _, weights) in found.items() if weights > 1e-10} == {}


def test_single_and_mixed_precision_stay_within_rounding(tmp_path):
    def work(_rank):
        how = {"dtype": torch.float32, "capacity": 32, "steps": [rows_of([41, 7], 0)]}
        mixed = (both_loops(SGD, precision="bf16", shard=shard, **how) for shard in ("zero1", "zero3"))
        return both_loops(ADAMW, **how), *mixed

    for single, *mixed in in_ranks(work, 2, tmp_path):
        assert single[0] < 2e-6
        assert single[1] < 1e-5
        for loss, _, weights in mixed:
            assert max(loss, weights) < 2e-3


def test_a_surrounding_autocast_is_that_of_the_step():
    found = []
    for surrounding in (True, False):
        model, given = small_model(torch.float32), None if surrounding else "bf16"
        with (
            Session(model, SGD(model.parameters()), capacity_tokens=256, precision=given) as session,
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=surrounding),
        ):
            result = session.backward(steps_of()[0])
        found.append((result.loss, result.grad_norm))
    assert found[0] == found[1]


def grouped():
    """Return a tied model with a frozen weight, and its optimizer."""
    model = small_model(tie_word_embeddings=True)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    return model, in_groups(model.parameters())


def planned_state(_rank, layout, model, optimizer, steps, *, loads=None, saves=None):
    """Make the steps from a state or the start; return rank 0's state after. saves: folder for that after one step."""
    with Session(model, optimizer, capacity_tokens=128, **layout) as session:
        if loads is not None:
            session.load(loads)
        for rows in steps:
            planned_loop(session, optimizer, CONSTANT(optimizer), [rows])
            if saves is not None and session.steps == 1:
                session.save(saves)
        assert "Call session.save" in said(optimizer.state_dict)
        return whole_state(session)


def plain_state(model, optimizer, steps):
    with keep_double(torch.float64):
        plain_loop(model, optimizer, CONSTANT(optimizer), steps)
    weights = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    return {**optimizer.state_dict(), "steps": 2, "master_weights": weights}


def test_an_exported_state_goes_on_in_a_plain_loop(tmp_path):
    """Tied parameters lie otherwise under zero3; the frozen one has a number, too."""
    steps, folder, file = steps_of([[9, 40], [31, 2]]), tmp_path / "state", tmp_path / "optimizer.pt"
    (model, optimizer), layout = grouped(), {"shard": "zero3"}
    optimizer.param_groups[1].update(lr=2e-2, weight_decay=0.3)
    work = partial(planned_state, layout=layout, model=model, optimizer=optimizer, steps=steps, saves=folder)
    wanted, other = in_ranks(in_double(work), 2, tmp_path)
    assert other == {}
    assert call("checkpoint", "export", folder, file) == 0
    (model, optimizer), state = grouped(), torch.load(file, weights_only=True)
    model.load_state_dict(state["master_weights"], strict=False)
    optimizer.load_state_dict(state)
    assert state["steps"] == 1
    torch.testing.assert_close(plain_state(model, optimizer, steps[1:]), wanted, rtol=1e-8, atol=1e-11)


def test_a_plain_loops_optimizer_goes_on_in_a_session(tmp_path):
    """As it is, or from the file that the loop saved."""
    steps, (model, optimizer) = steps_of([[9, 40], [31, 2], [12]])[:2], grouped()
    optimizer.param_groups[1]["lr"] = 2e-2
    plain_state(model, optimizer, steps[:1])
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")

    def work(rank):
        found = []
        for layout, loads in (("zero3", tmp_path / "optimizer.pt"), ("zero1", None)):
            own, made = grouped()
            own.load_state_dict(model.state_dict())
            if loads is None:
                made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            found.append(planned_state(rank, {"shard": layout}, own, made, steps[1:], loads=loads))
        return found

    given, _ = in_ranks(in_double(work), 2, tmp_path)
    wanted = plain_state(model, optimizer, steps[1:])
    for found in given:
        torch.testing.assert_close({**found, "steps": 2}, wanted, rtol=1e-8, atol=1e-11)


def test_a_loss_may_run_the_model_once_more_without_gradients_beside_recomputation():
    """As TRL's SFTTrainer does for its metrics, beside a loss of the user's."""

    def twice(model, inputs):
        with torch.no_grad():
            model(**inputs)
        return model(**inputs, num_items_in_batch=float(loss_tokens(rows))).loss

    rows, found = rows_of([40, 9, 25], 3), []
    for recompute in ("none", "layer"):
        model = small_model()
        with Session(model, SGD(model.parameters()), capacity_tokens=64, recompute=recompute) as session:
            result = session.backward(rows, compute_loss=twice)
            found.append((result.loss, result.grad_norm))
    assert found[1] == pytest.approx(found[0], rel=1e-9)


def test_an_exported_state_keeps_the_masters_of_weights_in_bf16(tmp_path):
    def run(steps, **saved):
        model = small_model(torch.bfloat16)
        planned_state(0, {}, model, ADAMW(model.parameters()), steps, **saved)
        return list(model.parameters())

    steps = steps_of()[:2]
    whole = run(steps, saves=tmp_path / "state")
    assert call("checkpoint", "export", tmp_path / "state", tmp_path / "optimizer.pt") == 0
    assert all(map(torch.equal, run(steps[1:], loads=tmp_path / "optimizer.pt"), whole))


def test_outside_of_a_step_the_model_is_plain(tmp_path):
    (tmp_path / "file").write_text("")

    def work(_rank):
        model, (rows,) = small_model(), steps_of([[30, 9]])
        before = copy.deepcopy(model)
        optimizer = SGD(model.parameters(), lr=0.0)
        with Session(model, optimizer, capacity_tokens=20) as session:
            prompt, how = torch.tensor([[1, 2, 3]]), {"max_new_tokens": 4, "do_sample": False}
            assert torch.equal(model.generate(prompt, **how), before.generate(prompt, **how))
            assert model.config._attn_implementation == "sdpa"
            assert sum(session.backward(rows).wait_seconds) > 0, "of ranks that share a sequence, one is later"
            before.load_state_dict({name: each + 0.5 for name, each in before.state_dict().items()})
            model.load_state_dict(before.state_dict())
            session.backward(rows)
            optimizer.step()  # publishes masters, which are those that were loaded
            assert all(map(torch.equal, model.parameters(), before.parameters()))
            assert "expected a folder; got a file" in said(lambda: session.save_pretrained(tmp_path / "file"))

    in_ranks(in_double(work), 2, tmp_path)


def test_a_model_that_does_not_train_is_evaluated_where_it_lies(tmp_path):
    """The reference of a preference loss: no optimizer, no gradients, and no second copy of its values."""

    def work(rank):
        model = small_model().requires_grad_(False)
        rows = rows_of([70, 3, 9], seed=1)
        wanted, before = plain_loss(model, rows, torch.float64), [each.data_ptr() for each in model.parameters()]
        if rank:
            model.load_state_dict({name: torch.zeros_like(each) for name, each in model.state_dict().items()})
        with Session(model, capacity_tokens=64) as session:
            found = session.evaluate(rows).loss
            with pytest.raises(LengthwiseError, match="an optimizer for backward"):
                session.backward(rows)
        assert before == [each.data_ptr() for each in model.parameters()]
        assert found == pytest.approx(wanted, rel=1e-13)

    in_ranks(in_double(work), 2, tmp_path)


def low_bit(package):
    return type("AdamW8bit", (torch.optim.SGD,), {"__module__": f"{package}.optim"})


NOT_KEPT = [
    (torch.float64, torch.optim.Adafactor, "Adafactor: its update of an entry depends on the rows"),
    (torch.float64, low_bit("bitsandbytes"), "share a scale in blocks"),
    (torch.float64, low_bit("torchao"), "share a scale in blocks"),
    (torch.float64, lambda given: SGD([*given][1:]), "every trainable parameter in a group; got 1 "),
    (torch.float64, lambda given: SGD([*given, torch.nn.Parameter(torch.zeros(2))]), "parameters alone; got 1 "),
    (torch.float16, SGD, "trainable parameters in float32"),
]


@pytest.mark.parametrize(("dtype", "make", "words"), NOT_KEPT)
def test_what_cannot_be_kept_is_refused_by_name(dtype, make, words):
    model = small_model(dtype)
    with pytest.raises(LengthwiseError, match=words):
        Session(model, make(model.parameters()), capacity_tokens=64)


def test_a_loss_that_becomes_a_mean_is_refused_whatever_it_is_made_of():
    """Of the same code each time; and what checks it draws no random numbers, and says that it is a check."""

    def of(outputs, tokens, reduction):
        seen.append(tokens.is_check)
        return F.cross_entropy(outputs.logits[0], tokens.shift_labels, ignore_index=-100, reduction=reduction)

    class Loss(torch.nn.Module):
        reduction = "sum"

        def forward(self, outputs, tokens):
            return of(outputs, tokens, self.reduction)

    def changed(reduction):
        module.reduction = reduction
        return module

    def zero_sum(outputs, tokens):
        logits = outputs.logits[0].float()
        return (logits - logits.detach()).sum() + torch.where(tokens.position_ids % 2 == 0, 1.1, -1.1).sum()

    def drawing(outputs, tokens):
        noise = torch.rand(len(tokens.input_ids), 1, dtype=torch.float64)
        return (outputs.logits[0] * noise).sum()

    def drawn_by(call):
        torch.manual_seed(0)
        call()
        return torch.rand(1)

    model, rows, module, seen = small_model(), rows_of([20, 30], 1), Loss(), list[bool]()
    tokens = sum(len(row["input_ids"]) for row in rows)
    kinds = [lambda word: partial(of, reduction=word), lambda word: lambda *given: of(*given, word), changed]
    with Session(model, SGD(model.parameters()), capacity_tokens=128) as session:
        for made in (*kinds, lambda word: changed(word).forward):
            session.backward(rows, loss=made("sum"))
            found = said(partial(session.backward, rows, loss=made("mean")))
            assert "the sum over a microbatch's tokens" in found
        assert seen.count(False) == 8, "of 8 calls"
        session.backward(rows, loss=zero_sum)
        found = drawn_by(lambda: session.backward(rows, loss=drawing))
        session.optimizer.zero_grad()
    assert found == drawn_by(lambda: torch.rand(tokens, 1, dtype=torch.float64))


@pytest.mark.parametrize("options", [{}, more({"stages": 2})])
def test_a_compute_loss_that_is_a_mean_is_refused_on_all_ranks_when_it_becomes_one(options, tmp_path):
    """And is called for this when it is new, in which its divisor does not count."""

    def of(model, inputs, divisor, word, given=None):
        calls.append(inputs["labels"].numel())
        found = model(**inputs, num_items_in_batch=divisor if word == "sum" else None).loss
        return found if word == "sum" else found / divisor

    def work(rank):
        model, rows = small_model(), rows_of([20, 30], 1)
        with Session(model, SGD(model.parameters()), capacity_tokens=128, **options) as session:
            session.backward(rows, compute_loss=partial(of, divisor=50.0, word="sum", given={"of": torch.zeros(2)}))
            first = len(calls)
            for divisor in (40.0, 30.0):
                of_step = {"divisor": divisor, "given": {"of": torch.ones(2)}}
                session.backward(rows, compute_loss=partial(of, **of_step, word="sum"))
            later = len(calls) - first
            of_mean = partial(of, divisor=50.0, word=f"mean of rank {rank}")
            told = said(lambda: session.evaluate(rows, compute_loss=of_mean))
            assert "compute_loss: expected a microbatch's share" in told
            told = said(lambda: session.backward(rows, loss=lambda output, _: output.logits.mean()))
            assert "the sum over a microbatch's tokens" in told
            return first, later

    calls: list[int] = []
    for first, later in in_ranks(in_double(work), 2, tmp_path):
        assert (first, later) in ((3, 2), (0, 0)), "none but on the last stage"


def test_batches_of_an_iterator_that_a_loop_left_come_later_and_a_list_begins_anew(tmp_path):
    """Left by break and by an error of the loop or a row; several times; another one between."""

    def work(_rank):
        def numbers():
            for number in range(1, 10):
                yield [[1] * number, [1000] if number == 7 else [2, 3]]

        model, rows, found = small_model(), numbers(), list[list[int]]()
        with Session(model, SGD(model.parameters()), capacity_tokens=64) as session:

            def take(batches, most):
                taken = []
                found.append(taken)
                for step in session.batches(batches):
                    taken.append(step.plan.tokens[0])
                    if len(taken) == most:
                        break
                    if taken[-1] == 5:
                        raise ZeroDivisionError

            listed = [[[1] * 11], [[1] * 12], [[1] * 13]]
            take(rows, 2)
            take(listed, 1)
            take(rows, 1)
            for error, said in ((ZeroDivisionError, None), (LengthwiseError, "sequence 1, input_ids")):
                with pytest.raises(error, match=said):
                    take(rows, 9)
            take(listed, 3)
            take(rows, 9)
            take(rows, 9)
        return found

    for found in in_ranks(work, 2, tmp_path):
        assert found == [[1, 2], [11], [3], [4, 5], [6], [11, 12, 13], [8, 9], []]


def test_what_goes_wrong_with_batches_is_named_on_all_ranks(tmp_path):
    """An iterator that raises on one rank, a row that no plan takes, rows that differ; then the session goes on."""

    def work(rank):
        model = small_model()
        with Session(model, SGD(model.parameters()), capacity_tokens=64, timeout_seconds=20) as session:
            broken = (1 / 0 if rank == 0 else [[1, 2]] for _ in range(2))
            raised = said(lambda: list(session.batches(broken)), (ZeroDivisionError, LengthwiseError))
            others = [said(partial(session.backward, [rows])) for rows in ([1] * 500, [1, 2, rank])]
            return raised, *others, session.backward([[1, 2, 3]]).num_tokens

    for rank, (raised, long, other, tokens) in enumerate(in_ranks(work, 2, tmp_path)):
        assert raised.endswith("got ZeroDivisionError: division by zero. Look at the error of rank 0." * rank)
        assert "expected at most 128 tokens" in long
        assert "another digest on rank 1" in other
        assert "no DistributedSampler" in other
        assert tokens == 3


def test_rows_with_one_prompt_compute_it_once(tmp_path, capfd):
    """Where labels alone count: a loop's own loss and values see whole rows."""
    rows = []
    for prompt, tokens in ((60, 10), (40, 2), (60, 30), (40, 1)):
        ids = torch.cat([torch.arange(prompt), torch.arange(tokens) + 7 * tokens]) % 64
        rows.append({"input_ids": ids, "labels": torch.where(torch.arange(len(ids)) < prompt, -100, ids)})

    def own(outputs, tokens):
        return F.cross_entropy(outputs.logits[0], tokens.shift_labels, ignore_index=-100, reduction="sum")

    def work(_rank):
        found = both_loops(ADAMW, capacity=128, steps=[rows])
        model = small_model()
        with Session(model, SGD(model.parameters()), capacity_tokens=128) as session:
            (planned,) = session.batches([rows])
            turns = [{**row, "turn": [number] * len(row["labels"])} for number, row in enumerate(rows)]
            assert not session.backward(turns).plan.parents, "the column may be an input of the model"
            assert session.backward([{**row, "turn": [0] * len(row["labels"])} for row in rows]).plan.parents
            session.optimizer.zero_grad()
            steps = [session.backward(planned, loss=own), session.backward(planned)]
        with Session(model, SGD(model.parameters()), capacity_tokens=128, share_prefixes="off") as session:
            steps.append(session.backward(planned))  # of a session that shares
        return found, [(bool(step.plan.parents), step.num_tokens, step.loss) for step in steps]

    for found, steps in in_ranks(in_double(work), 2, tmp_path):
        assert max(found) < 1e-11
        assert [shares for shares, _, _ in steps] == [False, True, False]
        assert {tokens for _, tokens, _ in steps} == {243}
        assert all(loss == pytest.approx(steps[0][2], rel=1e-13) for _, _, loss in steps)
    assert re.search(r"prompts that rows share are computed once: \d+% fewer tokens", capfd.readouterr().out)


def test_models_whose_tokens_depend_on_the_whole_row_share_no_prefix():
    assert can_share_prefixes(small_model())
    dynamic, balanced, dropping = small_model(rope_parameters=DYNAMIC), small_model(), small_model()
    balanced.config.output_router_logits = True
    dropping.model.embed_tokens = torch.nn.Sequential(dropping.model.embed_tokens, torch.nn.Dropout(0.1))
    assert not any(map(can_share_prefixes, (dynamic, balanced, dropping)))
