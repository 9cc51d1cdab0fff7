"""A stage of a pipeline: a Hugging Face model with some of its decoder layers, run one chunk at a time.

Layers of other chunks pass hidden states through, so that numbers, kinds and windows of layers stay. The hidden states
that a later chunk received enter at the layer before it, whatever the model does to embeddings; earlier chunks have no
norm and head. `check_stages` proves that a family has nothing else: with all layers passed through, the decoder must
return the hidden states that entered at the first.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from lengthwise.core.errors import ConfigError, ModelRefused
from lengthwise.core.shape import LayerCut
from lengthwise.models.dropout import NoDropout
from lengthwise.models.mixer_layers import count_mixers
from lengthwise.models.model_source import ModelSource, build_model
from lengthwise.models.own_rows import OwnRows, put_parameters
from lengthwise.models.router import has_balance_loss, has_router
from lengthwise.models.text_part import text_config, whole_model

_CHECKED_ROWS = 3


class PassedThrough(nn.Module):
    """Stands in for a layer: returns its hidden states in the layer's form, and has the layer's plain attributes.

    instead: received hidden states of the next chunk, to return in place of its input.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.instead: Tensor | None = None
        self._entries = _entries_returned(type(layer))
        kept = {
            name: value for name, value in vars(layer).items() if isinstance(value, str | int | float | bool | None)
        }
        self.__dict__.update({name: value for name, value in kept.items() if not name.startswith("_")})

    def forward(self, hidden_states: Tensor, *_args: object, **_kwargs: object) -> Any:
        """Return the hidden states, as the first of a tuple if the layer returns one."""
        found = hidden_states if self.instead is None else self.instead
        return (found, *[None] * (self._entries - 1)) if self._entries else found


def _entries_returned(kind: type[nn.Module]) -> int:
    """Return the length of the tuple that a layer's forward returns, or 0 if it returns hidden states alone."""
    steps = pairwise(dis.get_instructions(inspect.unwrap(kind.forward)))
    tuples = (
        before.arg or 0 for before, end in steps if (before.opname, end.opname) == ("BUILD_TUPLE", "RETURN_VALUE")
    )
    return max(tuples, default=0)


class _NoEmbedding(nn.Module):
    """Stands in for the embedding: returns zeros in the shape of the received hidden states, without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, *_args: object, **_kwargs: object) -> Tensor:
        if self.hidden is None:
            raise _alone()
        return self.hidden.new_zeros(()).expand_as(self.hidden)


class _NoHead(nn.Module):
    """Stands in for the head on other stages than the last, where planned steps run no head."""

    def forward(self, *_args: object, **_kwargs: object) -> Tensor:
        raise _alone()


def _alone() -> ModelRefused:
    expected, got = "a forward inside a planned step", "a forward of one stage, which has only some layers"
    remedy = "Save the model, and load the whole of it."
    return ModelRefused("model in stages", expected=expected, got=got, remedy=remedy)


class _NoNorm(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class _Slot:
    """The places of a module in a model, so that another can replace it."""

    def __init__(self, model: nn.Module, module: nn.Module) -> None:
        parents = {id(parent): parent for each in (model, whole_model(model)) for parent in each.modules()}
        self._places = [  # a head has two: in the text part and in the whole model
            (parent._modules, name)
            for parent in parents.values()
            for name, child in parent._modules.items()
            if child is module
        ]
        assert self._places, f"no {type(module).__name__} in the model"

    def put(self, module: nn.Module) -> nn.Module:
        before = [place[name] for place, name in self._places]
        assert before[0] is not None, f"no module at {self._places[0][1]}"
        for place, name in self._places:
            place[name] = module
        return before[0]


class _Parts:
    """The parts of a causal language model, found by their kinds, not by name."""

    def __init__(self, model: Any) -> None:
        self.decoder: nn.Module = model.get_decoder()
        self.embedding: nn.Module = model.get_input_embeddings()
        self.head: nn.Module = model.get_output_embeddings()
        number = model.config.num_hidden_layers
        children = list(self.decoder.children())
        lists = [each for each in children if isinstance(each, nn.ModuleList) and len(each) == number]
        others = [
            each
            for each in children
            if not any(each is list_ for list_ in lists) and any(True for _ in each.parameters())
        ]
        norms = [each for each in others if each is not self.embedding]
        beside = [name for name, each in model.named_children() if each not in (self.decoder, self.head)]
        own = [name for each in (model, self.decoder) for name, _ in each.named_parameters(recurse=False)]
        if len(lists) != 1 or len(norms) != 1 or len(others) != 2 or self.head is None or beside or own:
            got = f"{len(lists)} lists of {number} layers, and beside them " + ", ".join(
                [*(type(each).__name__ for each in others), *beside, *own]
            )
            raise _refused(model, "a decoder with one list of layers, an embedding and a norm, and a head", got)
        self.layers, self.norm = lists[0], norms[0]


def check_cut(config: Any, cut: LayerCut) -> None:
    """Refuse more chunks than layers, and models that `check_stages` refuses."""
    layers = text_config(config).num_hidden_layers
    if cut.chunks > layers:
        expected, got = f"stages x virtual of at most the {layers} layers", f"{cut.stages} x {cut.virtual}"
        raise ConfigError("stages", expected=expected, got=got, remedy="Lower stages or virtual.")
    check_stages(config)


def check_stages(config: Any) -> None:
    """Refuse a model whose forward is more than embedding, layers, norm and head.

    Raises:
        ModelRefused: it is.
    """
    model: Any = build_model(ModelSource(name="", config=config, weights=False), seed=0, stored=False)
    if getattr(model.config, "num_kv_shared_layers", None):
        got = "num_kv_shared_layers: keys of other layers, which stages do not send"
        raise _refused(model, "layers with keys of their own", got)
    parts = _Parts(model)
    if has_balance_loss(model.config) and not has_router(model, parts.layers[-1]):
        raise _refused(model, "a router in the last layer", "a balance loss, and a last layer without a router")
    passed = [PassedThrough(layer) for layer in parts.layers]
    for number, each in enumerate(passed):
        parts.layers[number] = each
    received, norm, ran = _NoEmbedding(), _NoNorm(), list[nn.Module]()
    for each in (*passed, norm):
        each.register_forward_hook(lambda module, _given, _found: ran.append(module))
    _Slot(model, parts.norm).put(norm)
    _Slot(model, parts.embedding).put(received)
    received.hidden = torch.randn(1, _CHECKED_ROWS, _width(model), generator=torch.Generator().manual_seed(0))
    passed[0].instead = given = received.hidden
    ids = torch.zeros(1, _CHECKED_ROWS, dtype=torch.long)
    dropped = NoDropout()
    try:
        with torch.no_grad(), dropped:
            found = parts.decoder(input_ids=ids, position_ids=torch.arange(_CHECKED_ROWS)[None], use_cache=False)
        same = torch.equal(found.last_hidden_state, given)
        got = "a decoder that changes hidden states after its first layer, outside of its layers"
    except Exception as error:  # noqa: BLE001 - the model's own code, with other layers
        same, got = False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if dropped.calls:
        raise _refused(model, "dropout only inside layers", "dropout after the embedding")
    if not same:
        raise _refused(model, "a decoder that changes hidden states only in its layers", got)
    if ran != [*passed, norm]:
        got = f"{len(ran)} runs of its {len(passed)} layers and one norm, or in another order"
        raise _refused(model, "a decoder that runs every layer once, and its norm after them", got)


def _width(model: Any) -> int:
    return model.get_output_embeddings().weight.shape[-1]


def _refused(model: Any, expected: str, got: str) -> ModelRefused:
    remedy = "Run this model without `stages`."
    return ModelRefused(f"stages: model {type(model).__name__}", expected=expected, got=got, remedy=remedy)


def _idle_stage(number: int, chunks: Sequence[range], stages: int) -> ConfigError:
    layers = ", ".join(str(layer) for chunk in chunks[number::stages] for layer in chunk)
    expected, got = "trainable parameters on every stage", f"none on stage {number} (layers {layers})"
    remedy = "Use fewer stages, or unfreeze parameters or add adapters on that stage."
    return ConfigError("stages", expected=expected, got=got, remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some layers of a model that run in one go.

    is_first: True for an input of ids, False for hidden states (1, rows, width). is_last: True if the result is the
    loss, False for hidden states. num_layers: number of layers, None for all. layers_passed: number of layers that mix
    tokens, outside of the chunk. running: context manager in which the model is this chunk, on hidden states, or on ids
    if None.
    """

    number: int = 0
    is_first: bool = True
    is_last: bool = True
    num_layers: int | None = None
    layers_passed: int = 0
    width: int = 0
    running: Callable[[Tensor | None], AbstractContextManager[Any]] = nullcontext


WHOLE = Chunk()


class ModelStage:
    """A model reduced to the chunks of one stage.

    chunks: layers of every chunk of the whole model; stage s of p has the chunks s, s + p, ..., its `own`. trained:
    shapes of the trainable parameters, by stage and name; a tied head belongs to the embedding. entries: (shape, dtype,
    whether it is a parameter) of the state dict's tensors, by stage and name.

    Raises:
        ConfigError: nothing trains on this stage, though something does on others.
    """

    def __init__(self, model: Any, chunks: Sequence[range], *, stages: int, stage: int) -> None:
        self.model, self.stages, self.stage = model, stages, stage
        self.chunks, parts = chunks, _Parts(model)
        self._parts, self._embedding, self._norm = parts, _Slot(model, parts.embedding), _Slot(model, parts.norm)
        self._head = _Slot(model, parts.head)
        self.own = {number: self._chunk(number) for number in range(len(chunks)) if number % stages == stage}
        stage_of_layer = {layer: number % stages for number, chunk in enumerate(chunks) for layer in chunk}
        modules = {0: [parts.embedding], stages - 1: [parts.norm, parts.head]}
        for number, layer in enumerate(parts.layers):
            modules.setdefault(stage_of_layer[number], []).append(layer)
        place = {id(each): s for s in reversed(range(stages)) for m in modules[s] for each in m.parameters()}
        weight = parts.embedding.weight
        self._is_tied = getattr(parts.head, "weight", None) is weight
        self._refuse_shared(modules, own={id(weight)} if self._is_tied else set())
        names = [name for name, each in model.named_parameters() if each is weight]
        if not names:
            got = f"a {type(parts.embedding).__name__} with single trainable rows (peft's trainable_token_indices)"
            raise _refused(model, "an input embedding with one weight", got)
        self._embedding_name = names[0]
        self.num_parameters = sum(each.numel() for each in model.parameters())
        trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        self.trained: list[dict[str, tuple[int, ...]]] = [
            {name: tuple(each.shape) for name, each in trained if place[id(each)] == s} for s in range(stages)
        ]
        if trained and not all(self.trained):
            raise _idle_stage(self.trained.index({}), chunks, stages)
        if has_balance_loss(model.config):  # while all layers are in their places
            maybe_install_capturing_hooks(model.get_decoder())
        self.entries = [self._entries_of(modules[s]) for s in range(stages)]
        self._passed = [PassedThrough(layer) for layer in parts.layers]
        self._removed: dict[int, nn.Module] = {}
        for number, layer in enumerate(list(parts.layers)):
            if stage_of_layer[number] != stage:
                parts.layers[number] = self._passed[number]
                self._removed[number] = layer.to("meta")
        self._received = _NoEmbedding()
        if stage > 0:
            self._embedding.put(self._received)
        if stage < stages - 1:
            instead = ((self._norm, _NoNorm()), (self._head, _NoHead()))
            self._removed_ends = [(place, place.put(module).to("meta")) for place, module in instead]

    def _refuse_shared(self, modules: Mapping[int, Sequence[nn.Module]], *, own: Collection[int]) -> None:
        """Refuse parameters and buffers with copies on two stages; `own` may be on the first and last."""
        names = {id(each): name for name, each in self.model.named_modules()}
        found = dict[int, tuple[int, str]]()
        for stage, of_stage in sorted(modules.items()):
            for module in of_stage:
                for name, each in (*module.named_parameters(), *module.named_buffers()):
                    here = stage, f"{names[id(module)]}.{name}"
                    there = found.setdefault(id(each), here)
                    if stage != there[0] and not (id(each) in own and (there[0], stage) == (0, self.stages - 1)):
                        got = f"{there[1]} on stage {there[0]}, which {here[1]} on stage {stage} is, too"
                        raise _refused(self.model, "layers that share no weights with layers of other stages", got)

    def _entries_of(self, modules: Sequence[nn.Module]) -> dict[str, tuple[tuple[int, ...], torch.dtype, bool]]:
        names = {id(module): name for name, module in self.model.named_modules()}
        found: dict[str, tuple[tuple[int, ...], torch.dtype, bool]] = {}
        for module in modules:
            parameters = {name for name, _ in module.named_parameters()}
            for name, value in module.state_dict().items():
                if not (self._is_tied and module is self._parts.head):
                    found[f"{names[id(module)]}.{name}"] = (tuple(value.shape), value.dtype, name in parameters)
        return found

    def read_weights(self, rows: OwnRows) -> None:
        """Read the values of this stage's parameters, which are on the meta device, from the model's files."""
        tied = self.tied_weight()
        given = dict(self.model.named_parameters())
        stored = {name: self._embedding_name if each is tied and self.stage else name for name, each in given.items()}
        put_parameters(self.model, given, {n: rows.read(stored[n], 0, each.numel()) for n, each in given.items()})

    @contextmanager
    def whole(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Make the first stage's model whole inside the block, with the values of the other stages."""
        layers = self._parts.layers
        for number, layer in self._removed.items():
            layers[number] = layer
        taken = [(place, module, place.put(module)) for place, module in self._removed_ends]
        try:
            self.model.load_state_dict(values, assign=True, strict=False)
            if self._is_tied:
                self._parts.head.weight = self._parts.embedding.weight
            yield
        finally:
            if self._is_tied:
                self._parts.head.weight = nn.Parameter(torch.empty(0, device="meta"))
            for number, layer in self._removed.items():
                layers[number] = self._passed[number]
                layer.to("meta")
            for place, module, instead in taken:
                place.put(instead)
                module.to("meta")

    def tied_weight(self) -> nn.Parameter | None:
        """Return the tied weight: the embedding's on the first stage, the head's on the last, else None."""
        holders = {0: self._parts.embedding, self.stages - 1: self._parts.head}
        holder: Any = holders.get(self.stage) if self._is_tied else None
        return None if holder is None else holder.weight

    def _chunk(self, number: int) -> Chunk:
        config = self.model.config
        return Chunk(
            number=number,
            is_first=number == 0,
            is_last=number == len(self.chunks) - 1,
            num_layers=len(self.chunks[number]),
            layers_passed=count_mixers(config) - count_mixers(config, self.chunks[number]),
            width=_width(self.model),
            running=partial(self._running, number),
        )

    @contextmanager
    def _running(self, chunk: int, hidden: Tensor | None) -> Iterator[None]:
        is_first, is_last = self.own[chunk].is_first, self.own[chunk].is_last
        assert (hidden is None) == is_first, f"chunk {chunk} on {'ids' if hidden is None else 'hidden states'}"
        swapped: list[tuple[Callable[[nn.Module], nn.Module], nn.Module]] = []

        def swap(put: Callable[[nn.Module], nn.Module], module: nn.Module) -> None:
            swapped.append((put, put(module)))

        layers = self._parts.layers
        others = [layer for each in self.own if each != chunk for layer in self.chunks[each]]
        kept = {number: layers[number] for number in others}
        for number in others:
            layers._modules[str(number)] = self._passed[number]
        if self.stage == 0 and hidden is not None:
            swap(self._embedding.put, self._received)
        if self.stage == self.stages - 1 and not is_last:
            swap(self._norm.put, _NoNorm())
        before = None if is_first else self._passed[self.chunks[chunk].start - 1]
        self._received.hidden = hidden
        if before is not None:
            before.instead = hidden
        try:
            yield
        finally:
            self._received.hidden = None
            if before is not None:
                before.instead = None
            for put, module in swapped:
                put(module)
            for number, layer in kept.items():
                layers._modules[str(number)] = layer
