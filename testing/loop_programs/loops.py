"""Two loops that run a program: a plain one in fp64, a sequence at a time, and one on a session.

What a user writes is the same in both and stands once, in `Loop`; what a session replaces is in the two others.
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lengthwise import Session
from lengthwise.core.errors import LengthwiseError, NumericError
from lengthwise.models import keep_double
from testing.loop_programs.models import SUM_SCALE, by_sums, make_model, make_optimizer, make_parameter, make_rows
from testing.loop_programs.program import LAYOUTS, Operation, Program
from testing.saved import new_folder, whole_state
from testing.small import loss_tokens

_GAMMA = 0.7
Numbers = list[float]


class Loop:
    """A user's loop, with a method for each operation; each returns the numbers to compare."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._start()
        if program.early_hook is not None:
            self.hook(when=program.early_hook, what="weights")

    def _start(self) -> None:
        self.model = make_model(self.program.model)
        self.optimizer = make_optimizer(self.program.optimizer, self.model)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, _GAMMA)

    # What a session replaces, beside `clip`, `reload`, `evaluate_elsewhere` and `alone`.

    def backward(self, lengths: Sequence[int], seed: int, loss: str, normalizer: float | None) -> Numbers:
        raise NotImplementedError

    def evaluate(self, lengths: Sequence[int], seed: int) -> Numbers:
        raise NotImplementedError

    def backward_with_parameter(self, lengths: Sequence[int], seed: int, where: str) -> Numbers:
        raise NotImplementedError

    # What is the user's own.

    def groups(self, group: int | None = None) -> Iterator[nn.Parameter]:
        """Yield the parameters of a group, or all, as the optimizer has them now."""
        for number, each in enumerate(self.optimizer.param_groups):
            if group in (None, number):
                yield from each["params"]

    def named(self, name: str) -> Iterator[nn.Parameter]:
        """Yield the model's parameters with a name, or a second name, that has `name` in it, each once."""
        found = dict[int, nn.Parameter]()
        for own, each in self.model.named_parameters(remove_duplicate=False):
            if name in own:
                found[id(each)] = each
        yield from found.values()

    def scale_groups(self, group: int | None, factor: float, how: str) -> Numbers:
        found = [(each, each.grad) for each in self.groups(group) if each.grad is not None]
        if how == "foreach" and found:
            torch._foreach_mul_([gradient for _, gradient in found], factor)
        for each, gradient in found if how != "foreach" else ():
            if how == "anew":
                each.grad = gradient * factor
            else:
                gradient.mul_(factor)
        return []

    def clip_values_of_groups(self, group: int | None, limit: float) -> Numbers:
        found = [each for each in self.groups(group) if each.grad is not None]
        if found:  # torch raises where there is none
            nn.utils.clip_grad_value_(found, limit)
        return []

    def set_gradients_of_groups(self, group: int | None, value: float | None) -> Numbers:
        return self._set_gradients(self.groups(group), value)

    def set_gradients_named(self, name: str, value: float | None) -> Numbers:
        return self._set_gradients((each for each in self.named(name) if each.requires_grad), value)

    def _set_gradients(self, parameters: Iterator[nn.Parameter], value: float | None) -> Numbers:
        for each in parameters:
            each.grad = None if value is None else torch.full_like(each, value)
        return []

    def clip_groups(self, group: int | None, limit: float) -> Numbers:
        return [float(nn.utils.clip_grad_norm_(list(self.groups(group)), limit))]

    def clip_model(self, limit: float) -> Numbers:
        return [float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))]

    def step(self) -> Numbers:
        self.optimizer.step()
        return []

    def zero_grad(self, to_none: bool) -> Numbers:
        self.optimizer.zero_grad(set_to_none=to_none)
        return []

    def zero_grad_of_model(self, to_none: bool) -> Numbers:
        self.model.zero_grad(set_to_none=to_none)
        return []

    def scale_lr(self, group: int | None, factor: float) -> Numbers:
        for number, each in enumerate(self.optimizer.param_groups):
            if group in (None, number):
                each["lr"] *= factor
        return []

    def scheduler_step(self) -> Numbers:
        self.scheduler.step()
        return [each["lr"] for each in self.optimizer.param_groups]

    def write_groups(self, group: int | None, how: str) -> Numbers:
        return self._write(self.groups(group), how)

    def write_named(self, name: str, how: str) -> Numbers:
        return self._write((each for each in self.named(name) if each.requires_grad), how)

    def _write(self, parameters: Iterator[nn.Parameter], how: str = "in place") -> Numbers:
        with torch.no_grad():
            found = list[Tensor](parameters)
            if how == "foreach" and found:
                torch._foreach_mul_(found, 0.8)
            for each in found if how != "foreach" else ():
                if how == "clamp":
                    each.clamp_(-0.2, 0.2)
                elif how == "copy":
                    each.copy_(each * 0.8)
                else:
                    each.mul_(0.8)
        return []

    def swap_groups(self, lengths: Sequence[int], seed: int) -> Numbers:
        return self._swap(lambda: self.groups(), lengths, seed)

    def swap_named(self, lengths: Sequence[int], seed: int) -> Numbers:
        return self._swap(lambda: (each for each in self.named("") if each.requires_grad), lengths, seed)

    def _swap(self, parameters: Callable[[], Iterator[nn.Parameter]], lengths: Sequence[int], seed: int) -> Numbers:
        """Evaluate with other weights, as loops do with averages of weights."""
        with torch.no_grad():
            kept = [each.clone() for each in parameters()]
            self._write(parameters())
            found = self.evaluate(lengths, seed)
            for each, before in zip(parameters(), kept, strict=True):
                each.copy_(before)
        return found

    def hook(self, when: str, what: str) -> Numbers:
        def run(*_: object) -> None:
            if what == "weights":
                self.write_groups(None, "in place")
            else:
                self.scale_groups(None, 0.5, "in place")

        register = getattr(self.optimizer, f"register_step_{when}_hook")
        register(run)
        return []

    def forget_states(self) -> Numbers:
        for each in self.groups():
            self.optimizer.state[each] = {}
        return []

    def load_model(self, factor: float) -> Numbers:
        self.model.load_state_dict({name: each * factor for name, each in self.model.state_dict().items()})
        return []

    def backward_of_model(self, lengths: Sequence[int], seed: int) -> Numbers:
        """Add the gradient of a loss of the user's own."""
        loss = sum(
            self.model(input_ids=row["input_ids"][None]).logits.square().mean() for row in make_rows(lengths, seed)
        )
        assert isinstance(loss, Tensor), "there is a row"
        loss.mul(0.1).backward()
        return [loss.item()]

    def backward_of_weights(self, name: str) -> Numbers:
        """Add the gradient of a penalty on weights; where there are none of the name, nothing."""
        found = [each.square().sum() for each in self.named(name) if each.requires_grad]
        if found:
            torch.stack(found).sum().mul(0.01).backward()
        return []

    def freeze(self, name: str) -> Numbers:
        trained = [each for each in self.named("") if each.requires_grad]
        for each in [each for each in self.named(name) if each.requires_grad] or trained[:1]:
            each.requires_grad_(False)
        return []


class PlainLoop(Loop):
    """The loop that a session must equal: one process, whole sequences one at a time."""

    def backward(self, lengths: Sequence[int], seed: int, loss: str, normalizer: float | None) -> Numbers:
        with torch.enable_grad():
            found = self._loss(lengths, seed, loss, normalizer)
            found.backward()
        return [found.item(), self._norm()]

    def evaluate(self, lengths: Sequence[int], seed: int) -> Numbers:
        with torch.no_grad():
            return [self._loss(lengths, seed, "next token", None).item()]

    def evaluate_elsewhere(self, lengths: Sequence[int], seed: int) -> Numbers:
        return self.evaluate(lengths, seed)

    def fail(self) -> Numbers:
        """Lose the gradients, as a step does whose loss is not finite."""
        self.optimizer.zero_grad()
        return []

    def _loss(self, lengths: Sequence[int], seed: int, loss: str, normalizer: float | None) -> Tensor:
        rows = make_rows(lengths, seed)
        if loss in ("next token", "compute_loss") and self.program.model.startswith("own"):
            divisor = normalizer or loss_tokens(rows)
            columns = [{name: values[None] for name, values in row.items()} for row in rows]
            return torch.stack([self.model(**row, num_items_in_batch=divisor).loss for row in columns]).sum()
        each = self._losses(rows)
        if loss == "by sequence":
            return torch.stack([one.sum() for one in each]).square().mean() / SUM_SCALE
        found = torch.cat(each)
        return (found.square() if loss == "squares" else found).sum() / (normalizer or loss_tokens(rows))

    def _losses(self, rows: Sequence[Mapping[str, Tensor]], scale: Tensor | float = 1.0) -> list[Tensor]:
        """Return the cross entropy of each row's tokens, of logits times `scale`."""
        each = list[Tensor]()
        for row in rows:
            logits = self.model(input_ids=row["input_ids"][None], use_cache=False).logits[0, :-1] * scale
            each.append(F.cross_entropy(logits, row["labels"][1:], ignore_index=-100, reduction="none"))
        return each

    def backward_with_parameter(self, lengths: Sequence[int], seed: int, where: str) -> Numbers:
        rows, own = make_rows(lengths, seed), make_parameter()
        each = self._losses(rows, own if where in ("loss", "values") else 1.0)
        if where in ("loss", "compute_loss"):
            loss = torch.cat(each).sum() / loss_tokens(rows) * (own if where == "compute_loss" else 1.0)
        else:
            loss = by_sums(torch.stack([one.sum() for one in each]), where, own, self.model)
        loss.backward()
        return [loss.item(), self._norm(), 0.0 if own.grad is None else own.grad.item()]

    def _norm(self) -> float:
        found = [each.grad.norm() for each in self.model.parameters() if each.grad is not None]
        return float(torch.stack(found).norm()) if found else 0.0

    def clip(self, limit: float) -> Numbers:
        return [float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))]

    def reload(self) -> Numbers:
        """Go on with an optimizer without hooks and gradients."""
        model, state = self.model.state_dict(), self.optimizer.state_dict()
        self._start()
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(state)
        return []

    def weights(self) -> dict[str, Tensor]:
        """Return what trained, by name."""
        return {name: each.detach().clone() for name, each in self.model.named_parameters() if each.requires_grad}


class PlannedLoop(Loop):
    """The same loop on a session, on this rank. wait_seconds: for another rank."""

    def __init__(self, program: Program, wait_seconds: float) -> None:
        self._wait_seconds = wait_seconds
        super().__init__(program)

    def _start(self) -> None:
        super()._start()
        self.session = self._opened(self.optimizer)

    def _opened(self, optimizer: torch.optim.Optimizer | None, **changes: Any) -> Session:
        layout = LAYOUTS[self.program.layout]
        capacity = 64 if self.program.ranks == 1 else layout.capacity
        options: dict[str, Any] = {"capacity_tokens": capacity, "recompute": "none", **layout.options, **changes}
        return Session(self.model, optimizer, timeout_seconds=self._wait_seconds, **options)

    def backward(self, lengths: Sequence[int], seed: int, loss: str, normalizer: float | None) -> Numbers:
        rows = make_rows(lengths, seed)
        if loss == "by sequence":
            result = self.session.backward_by_sequence(rows, combine=lambda sums: sums.square().mean() / SUM_SCALE)
        elif loss == "compute_loss":
            divisor = loss_tokens(rows)
            result = self.session.backward(
                rows, compute_loss=lambda model, inputs: model(**inputs, num_items_in_batch=divisor).loss
            )
        else:
            own = _squares if loss == "squares" else None
            result = self.session.backward(rows, loss=own, normalizer=normalizer)
        return [result.loss, float(result.grad_norm or 0.0)]

    def backward_with_parameter(self, lengths: Sequence[int], seed: int, where: str) -> Numbers:
        rows, own = make_rows(lengths, seed), make_parameter()
        divisor = loss_tokens(rows)

        def scaled(output: Any, tokens: Any) -> Tensor:
            logits = output.logits[0] * (own if where in ("loss", "values") else 1.0)
            return F.cross_entropy(logits, tokens.shift_labels, ignore_index=-100, reduction="none")

        if where == "loss":
            result = self.session.backward(rows, loss=lambda output, tokens: scaled(output, tokens).sum())
        elif where == "compute_loss":

            def compute_loss(model: Any, inputs: dict[str, Any]) -> Tensor:
                logits = model(**{**inputs, "labels": None}).logits[0, :-1]
                each = F.cross_entropy(logits, inputs["labels"][0, 1:], ignore_index=-100, reduction="sum")
                return each * own / divisor

            result = self.session.backward(rows, compute_loss=compute_loss)
        else:
            combine = partial(by_sums, where=where, own=own, model=self.model)
            result = self.session.backward_by_sequence(rows, combine=combine, values=scaled)
        return [result.loss, float(result.grad_norm or 0.0), 0.0 if own.grad is None else own.grad.item()]

    def evaluate(self, lengths: Sequence[int], seed: int) -> Numbers:
        return [self.session.evaluate(make_rows(lengths, seed)).loss]

    def fail(self) -> Numbers:
        try:
            self.session.backward(make_rows([9], 0), loss=lambda output, _: output.logits.sum() * math.nan)
        except NumericError:
            return []
        raise AssertionError("a loss of NaN was taken")

    def step(self) -> Numbers:
        whole = list[nn.Parameter](self.model.parameters() if LAYOUTS[self.program.layout].is_whole else ())
        before = [each.detach().clone() for each in whole]
        try:
            return super().step()
        except LengthwiseError:
            assert all(map(torch.equal, whole, before)), "a refused step changes nothing"
            raise

    def evaluate_elsewhere(self, lengths: Sequence[int], seed: int) -> Numbers:
        options = {"shard": "zero1", "stages": 1, "offload_optimizer": False, "ranks_per_node": None}
        with self._opened(None, **options) as session:
            return [session.evaluate(make_rows(lengths, seed)).loss]

    def clip(self, limit: float) -> Numbers:
        return [self.session.clip_grad_norm_(limit)]

    def reload(self) -> Numbers:
        folder = new_folder(self.session)
        self.session.save(folder / "state")
        self.session.close()
        self._start()
        self.session.load(folder / "state")
        if not self.session.rank:
            shutil.rmtree(folder)
        return []

    def alone(self, rank: int, what: str) -> Numbers:
        is_own = self.session.rank == rank % self.session.world_size
        if what == "limit":
            self.session.clip_grad_norm_(0.01 if is_own else 0.02)
        elif what == "normalizer":
            self.session.backward(make_rows([9, 5], 0), normalizer=7.0 if is_own else 8.0)
        elif what == "loss":
            self.session.backward(make_rows([9, 5], 0), loss=_squares if is_own else None)
        elif is_own and what == "mode":
            self.model.eval()
        elif is_own and what == "own gradient":
            self.set_gradients_named("lm_head", 0.0)
        elif is_own and what == "lr":
            self.scale_lr(None, 0.5)
        elif is_own and what == "weights of groups":
            self.write_groups(None, "in place")
        elif is_own and what == "weights by name":
            self.write_named("", "in place")
        elif is_own and what == "gradients of groups":
            self.scale_groups(None, 0.5, "in place")
        elif is_own:
            self.optimizer.zero_grad()
        return []

    def weights(self) -> dict[str, Tensor]:
        """Return what trained, by name, on rank 0; {} on others. Collective."""
        return whole_state(self.session).get("master_weights", {})

    def close(self) -> None:
        self.session.close()


def _squares(output: Any, tokens: Any) -> Tensor:
    each = F.cross_entropy(output.logits[0], tokens.shift_labels, ignore_index=-100, reduction="none")
    return each.square().sum()


def run_operations(loop: Loop, operations: Sequence[Operation], numbers: list[Numbers]) -> None:
    """Run operations, and append what each operation returns to `numbers`, quietly and in fp64."""
    with keep_double(torch.float64), warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        for each in operations:
            numbers.append(getattr(loop, each.name)(**each.arguments))
