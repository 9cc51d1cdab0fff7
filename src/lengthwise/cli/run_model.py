"""The model of a run file without torch: its shape, its trained parameters, and its setup on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lengthwise.config import RunConfig
from lengthwise.core.errors import ConfigError
from lengthwise.core.files import read_json_object
from lengthwise.core.host_memory import free_host_bytes
from lengthwise.core.shape import ModelShape
from lengthwise.cost import Cost, Hardware, check_trained, named_shape, shape_from_config
from lengthwise.data import load_tokenizer
from lengthwise.setup import Machine, Setup, model_of_run, resolve

if TYPE_CHECKING:
    from lengthwise.core.plan import Images
    from lengthwise.data import Dataset


def setup_of_run(
    config: RunConfig,
    shape: ModelShape,
    hardware: Hardware,
    cost: Cost,
    *,
    ranks: int,
    adapters: int | None,
    ties: bool | None,
    **known: Any,
) -> Setup[RunConfig]:
    """Return the setup of a run file on `ranks` ranks of a hardware; for CPUs this machine's free memory counts.

    cost: costs with all parameters on every rank. adapters: number of adapter parameters, or None. ties: True if head
    and embedding are tied, None if unknown. known: facts about the data, as for `resolve`.
    """
    on_gpus = hardware.name != "cpu"
    here = min(ranks, hardware.ranks_per_node) if on_gpus else ranks
    room = hardware.device_bytes if on_gpus else free_host_bytes() / ranks or None
    machine = Machine(ranks=ranks, here=here, on_gpus=on_gpus)
    model = model_of_run(config, shape, on_gpus=on_gpus, trained=adapters, ties=ties)
    return resolve(config, model, machine, cost, room_bytes=room, **known)


def ties_of(model: str) -> bool | None:
    """Return whether a model's head and embedding are tied, or None without a local config.json that has the key."""
    path = Path(model) / "config.json"
    return read_json_object(str(path)).get("tie_word_embeddings") if path.is_file() else None


def adapters_of(config: RunConfig) -> int | None:
    """Return the number of adapter parameters, which needs torch, or None if the whole model trains."""
    if config.lora is None:
        return None
    from lengthwise.models import check_lora, find_model

    return check_lora(find_model(config.model, weights=config.weights, train_towers=config.train_towers), config.lora)


def images_of(config: RunConfig, dataset: Dataset, rows: Sequence[int]) -> Images:
    """Return the work on the images of rows, as in training; it needs torch if there are any."""
    if not any(dataset.images(row) for row in rows):
        return ()
    from lengthwise.data.image_files import PixelsAhead
    from lengthwise.engine.batch import ReadsFiles, StepBatch
    from lengthwise.models import find_model
    from lengthwise.models.images import ImageReader
    from lengthwise.models.lora import build_adapted

    source = find_model(config.model, weights=config.weights, train_towers=config.train_towers)
    reader = ImageReader(build_adapted(source, config.lora, seed=config.seed, stored=False))
    sees = ReadsFiles(reader, PixelsAhead(load_tokenizer(config.tokenizer_name).images))
    return StepBatch(dataset, rows, sees=sees).image_work()


def trained_of(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of `compare_ways` by a run file: LoRA rank, read without torch, and place of states."""
    lora = config.lora
    rank = lora and lora.r
    if lora is not None and lora.adapter is not None:
        rank = read_json_object(str(Path(lora.adapter) / "adapter_config.json"))["r"]
    return {"lora": rank, "offloads": config.optimizer.offload}


def shape_of_run(
    config: RunConfig, *, remedy: str = "Add --model-shape llama-7b --hardware h100, or other names."
) -> ModelShape:
    """Read the shape of a run file's model without torch."""
    if config.model == "tiny":
        return named_shape("tiny")
    path = Path(config.model) / "config.json"
    if not path.is_file():
        expected = "tiny, or a local folder with config.json, to know its costs"
        raise ConfigError("model", expected=expected, got=config.model, remedy=remedy)
    check_trained(str(path))
    return shape_from_config(read_json_object(str(path)))
