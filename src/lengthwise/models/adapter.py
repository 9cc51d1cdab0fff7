"""Run a Hugging Face model on this rank's tokens of a plan.

Our attention function, registered by name, gets the microbatch's `PlannedAttention` as an extra keyword of `forward`,
so models need no change; layers without attention get it in the same way (`mixers`). Positions count within each
sequence; block tasks need no mask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from lengthwise.attention import PlannedAttention, planned_attention
from lengthwise.core.errors import ModelRefused
from lengthwise.core.names import counted
from lengthwise.cost import logits_at_once as logits_by_rule
from lengthwise.models.loss import DecoderOutput, has_own_logits, loss_by, token_loss, token_losses
from lengthwise.models.mixer_layers import count_mixers, mixing_in_torch, put_mixers
from lengthwise.models.rope import forget_lengths, sequence_lengths

Result = TypeVar("Result")

LogitsAtOnce: TypeAlias = int | Literal["auto"] | None
"""Number of logits that a loss makes at a time. If None, all; auto: by `cost.logits_at_once`."""

ATTENTION_NAME = "lengthwise"

_ROUTERS = "output_router_logits"

# Arguments of Hugging Face's attention functions that do not affect the result.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", _ROUTERS}
    | {"num_items_in_batch", "shift_labels", "logits_to_keep"}  # for losses in Hugging Face's `forward`
)


def register_attention() -> None:
    """Register `attn_implementation="lengthwise"` with Hugging Face. Idempotent."""
    if ATTENTION_NAME not in AttentionInterface():
        AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask_asked)
    _spare_search_for_packs()


def leave_attention_eager() -> None:
    """Make the attention function a graph break for `torch.compile`: rings and packs cannot be traced."""
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(_attend))


def model_loss(
    model: nn.Module,
    planned: PlannedAttention,
    input_ids: Tensor,
    position_ids: Tensor,
    shift_labels: Tensor,
    weights: Tensor | None = None,
    *,
    collect_router: Callable[[list[Tensor]], None] | None = None,
    logits_at_once: LogitsAtOnce = "auto",
) -> Tensor:
    """Return the summed loss of this rank's tokens in one microbatch, in fp32 or wider.

    The three tensors are (tokens,), in the order of `MicrobatchProgram.segments`; `shift_labels[t]` is the label after
    token t, -100 without loss. weights: loss weights (tokens,), None for 1. collect_router: callback for the router
    logits, (tokens, experts) per layer with a router (`output_router_logits`).
    """
    chunk_tokens = _chunk_tokens(model, input_ids, logits_at_once)
    if chunk_tokens is None:
        output = _run(model, planned, input_ids, position_ids)
        loss = loss_by(model, token_loss, output.logits[0, : planned.num_tokens], shift_labels, weights)
    else:
        decoded = DecoderOutput(model)
        with decoded.caught():
            output = _run(model, planned, input_ids, position_ids)
        loss = decoded.loss(shift_labels, chunk_tokens, weights)
    if collect_router is not None:
        collect_router(_own_router_logits(output, planned))
    return loss


def model_log_probabilities(
    model: nn.Module,
    planned: PlannedAttention,
    input_ids: Tensor,
    position_ids: Tensor,
    shift_labels: Tensor,
    *,
    logits_at_once: LogitsAtOnce = "auto",
) -> Tensor:
    """Return the log-probability of each label, (tokens,), 0 without a label; no gradients.

    The arguments are those of `model_loss`, which returns minus their weighted sum, with gradients.
    """
    chunk_tokens = _chunk_tokens(model, input_ids, logits_at_once)
    with torch.no_grad():
        if chunk_tokens is None:
            output = _run(model, planned, input_ids, position_ids)
            return -loss_by(model, token_losses, output.logits[0, : planned.num_tokens], shift_labels)
        decoded = DecoderOutput(model)
        with decoded.caught():
            _run(model, planned, input_ids, position_ids)
        return -decoded.losses(shift_labels, chunk_tokens)


def _chunk_tokens(model: nn.Module, input_ids: Tensor, logits_at_once: LogitsAtOnce) -> int | None:
    """Return the number of tokens per chunk of logits, None for all at once: few tokens, or own logits."""
    vocabulary: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
    if logits_at_once == "auto":
        logits_at_once = logits_by_rule(vocabulary, on_gpus=input_ids.is_cuda)
    if logits_at_once is None or has_own_logits(model) or len(input_ids) * vocabulary <= logits_at_once:
        return None
    return max(1, logits_at_once // vocabulary)


def model_router_logits(
    model: nn.Module, planned: PlannedAttention, input_ids: Tensor, position_ids: Tensor
) -> list[Tensor]:
    """Return the router logits that `model_loss` passes to `collect_router`, without computing all logits."""
    return _own_router_logits(_run(model, planned, input_ids, position_ids, logits_to_keep=1), planned)


def run_layers(model: nn.Module, planned: PlannedAttention, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Run a model without a loss; return its decoder's hidden states, (1, rows, hidden)."""
    found: list[Tensor] = []
    decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
    handle = decoder.register_forward_hook(lambda _module, _asked, output: found.append(output.last_hidden_state))
    try:
        _run(model, planned, input_ids, position_ids, logits_to_keep=1)
    finally:
        handle.remove()
    return found[-1]


@contextmanager
def collecting_routers(
    model: nn.Module, planned: PlannedAttention, collect: Callable[[list[Tensor]], None] | None
) -> Iterator[dict[str, bool]]:
    """Pass the router logits of forwards in the block to `collect` (see `model_loss`), unless it is None.

    Yields:
        Inputs with which the model adds no balance loss of its own.
    """
    if collect is None:
        yield {}
        return

    def ask(_module: nn.Module, arguments: Any, given: dict[str, Any]) -> Any:
        if given.get(_ROUTERS):
            where, remedy = f"model {type(model).__name__}", f"Pass {_ROUTERS} on, which is in the inputs."
            got = "True, so that the microbatch's own balance loss would count, too"
            raise ModelRefused(f"{where}: {_ROUTERS}", expected="False", got=got, remedy=remedy)
        return arguments, {**given, _ROUTERS: True}

    decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
    handles = (
        decoder.register_forward_pre_hook(ask, with_kwargs=True),
        decoder.register_forward_hook(lambda _module, _asked, output: collect(_own_router_logits(output, planned))),
    )
    try:
        yield {_ROUTERS: False}
    finally:
        for handle in handles:
            handle.remove()


def run_chunk(
    model: nn.Module,
    planned: PlannedAttention,
    input_ids: Tensor,
    position_ids: Tensor,
    *,
    collect_router: Callable[[list[Tensor]], None] | None = None,
) -> Tensor:
    """Run only a model's decoder; return its hidden states, (1, rows, hidden). collect_router: see `model_loss`."""
    decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
    output = _run(model, planned, input_ids, position_ids, runs=decoder)
    if collect_router is not None:
        collect_router(_own_router_logits(output, planned))
    return output.last_hidden_state


def planned_output(model: nn.Module, planned: PlannedAttention, input_ids: Tensor, position_ids: Tensor) -> Any:
    """Return the model's output for this rank's tokens, without padding: `logits` (1, tokens, vocabulary) etc."""
    output = _run(model, planned, input_ids, position_ids)
    output.logits = output.logits[:, : planned.num_tokens]
    if output.get("hidden_states") is not None:
        output.hidden_states = tuple(hidden_state[:, : planned.num_tokens] for hidden_state in output.hidden_states)
    if output.get("router_logits") is not None:
        output.router_logits = tuple(_own_router_logits(output, planned))
    return output


def run_planned(
    model: nn.Module, planned: PlannedAttention, call: Callable[[], Result], *, once: bool = True
) -> Result:
    """Return the result of `call`, which runs `model` by the plan.

    once: True if it runs every layer once, False for any number of times.

    Raises:
        ModelRefused: some layers did not run by the plan.
    """
    planned.mixers = put_mixers(model, in_planned_forward)
    with sequence_lengths(model, planned.spans):
        _here.is_planned = True
        try:
            result = call()
        finally:
            _here.is_planned = False
    layers = count_mixers(model.config) - planned.layers_passed
    run = planned.layers_run
    if run != layers if once or not layers else (not run or run % layers):
        where, expected = f"model {type(model).__name__}", f"all {layers} layers that mix tokens to run by the plan"
        remedy = "Use another model: layers of other kinds would be silently wrong."
        raise ModelRefused(where, expected=expected, got=counted(run, "layer"), remedy=remedy)
    return result


def _run(
    model: nn.Module,
    planned: PlannedAttention,
    input_ids: Tensor,
    position_ids: Tensor,
    *,
    runs: nn.Module | None = None,
    **options: Any,
) -> Any:
    """Return the output of the model, or of its part `runs`; rows past `planned.num_tokens` are padding."""
    # Up to a multiple that suits the device, and at least one row: in a ring of more ranks than tokens some ranks have
    # no token but pass keys on, and Hugging Face cannot run on no rows.
    padding = planned.num_rows - planned.num_tokens
    if padding:
        input_ids, position_ids = (F.pad(x, (0, padding)) for x in (input_ids, position_ids))
    inputs = {"input_ids": input_ids[None], "position_ids": position_ids[None], "use_cache": False}
    return run_planned(model, planned, lambda: (runs or model)(**inputs, lengthwise=planned, **options))


@contextmanager
def attending_by_plan(model: nn.Module) -> Iterator[None]:
    """Let a model attend by its plan inside the block."""
    register_attention()
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = before


_here = threading.local()  # ranks may be threads of one process


def in_planned_forward() -> bool:
    """Return whether this thread is in a planned forward."""
    return getattr(_here, "is_planned", False)


class _Spared:
    """A function that returns None in planned forwards, and runs as usual elsewhere."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if in_planned_forward() else self._function(*args, **kwargs)


def _spare_search_for_packs() -> None:
    """Skip Hugging Face's search for packs in planned forwards: it waits for the device, for unused masks."""
    search = getattr(masking_utils, "find_packed_sequence_indices", None)
    if search is not None and not isinstance(search, _Spared):
        masking_utils.find_packed_sequence_indices = _Spared(search)


def _own_router_logits(output: Any, planned: PlannedAttention) -> list[Tensor]:
    return [logits.reshape(-1, logits.shape[-1])[: planned.num_tokens] for logits in output.router_logits]


def plain_output(model: nn.Module, input_ids: Tensor, **images: Tensor) -> Any:
    """Return the plain Hugging Face model's output for one whole sequence of input ids (tokens,), and its images."""
    forget_lengths(model)
    with mixing_in_torch(model):
        # use_cache=False: with a cache packed rows would silently see each other.
        return model(input_ids=input_ids[None], use_cache=False, **images)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedMask:
    """Hugging Face's mask beyond causality: a window or chunk, or a `custom` function of the model."""

    local_tokens: int | None
    custom: bool

    def __getitem__(self, _part: object) -> AskedMask:
        """Return the mask itself for the queries' part of it; fewer queries than tokens are refused elsewhere."""
        return self


def _mask_asked(
    *_args: object, local_size: int | None = None, use_vmap: bool = False, **_kwargs: object
) -> AskedMask | None:
    """Return None for a causal mask, else a record that `_attend` compares."""
    return AskedMask(local_tokens=local_size, custom=use_vmap) if use_vmap or local_size is not None else None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | AskedMask | None,
    *,
    lengthwise: PlannedAttention | None = None,
    scaling: float | None = None,
    dropout: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Attend by the plan; query is (1, heads, tokens, head_dim), key and value (1, kv_heads, tokens, head_dim).

    s_aux: attention sinks, (heads,). softcap: cap of scores. asked: Hugging Face's other arguments.
    """
    refused = {name: value for name, value in asked.items() if name not in _WITHOUT_EFFECT and value is not None}
    if isinstance(attention_mask, Tensor):
        refused["attention_mask"] = "a tensor"
    elif attention_mask != (None if sliding_window is None else AskedMask(local_tokens=sliding_window, custom=False)):
        refused["attention_mask"] = f"{attention_mask} beside sliding_window={sliding_window}"
    if dropout:
        refused["dropout"] = dropout
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):  # Hugging Face's rule
        refused["is_causal"] = False
    if lengthwise is None:
        refused["lengthwise"] = "nothing (the model was called outside a plan)"
    if sliding_window is not None and sliding_window < 1:
        refused["sliding_window"] = sliding_window
    no_cap = None if lengthwise is None or softcap is None else lengthwise.no_cap
    if softcap is not None and (softcap <= 0 or no_cap):
        refused["softcap"] = f"{softcap} ({no_cap or 'which should be above 0'})"
    if refused or lengthwise is None:
        where = f"attention of {type(module).__name__}"
        got = ", ".join(f"{name}={value}" for name, value in refused.items())
        remedy = "Use another model: lengthwise does not support this attention yet."
        raise ModelRefused(where, expected="only arguments that the planned attention handles", got=got, remedy=remedy)
    assert query.shape[2] == lengthwise.num_rows, f"{query.shape[2]} queries in {lengthwise.num_rows} rows"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    sizes = query.shape[-1], value.shape[-1]
    if sizes[0] != sizes[1]:
        # Zeros at the end of each head change no score, and are cut off from values again. Kernels and rings need one
        # size; multi-head latent attention has smaller values than keys (128 and 192).
        q, k, v = (F.pad(x, (0, max(sizes) - x.shape[-1])) for x in (q, k, v))
    kind, how = query.device.type, {"scale": scale, "window": sliding_window, "sinks": s_aux, "softcap": softcap}
    if torch.is_autocast_enabled(kind):  # RoPE leaves queries and keys wide, and torch casts only for its attention
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
        with torch.autocast(kind, enabled=False):
            out = planned_attention(q, k, v, lengthwise, **how)
    else:
        out = planned_attention(q, k, v, lengthwise, **how)
    return out[None, ..., : value.shape[-1]], None
