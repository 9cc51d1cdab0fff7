"""Check a run file, its model and its data against each other, before the ranks meet.

Defaults that depend on model and device (precision, learning rate, schedule, warm-up) are filled in here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from lengthwise.config import (
    FRESH_RATE,
    LOADED_RATE,
    LOADED_WARMUP,
    LORA_RATE,
    MEASURE_AT_START,
    MEASURE_NOTHING,
    TINY_MODEL,
    DataSource,
    RunConfig,
    TrainingSettings,
)
from lengthwise.core.errors import Collector, ConfigError, DataError
from lengthwise.core.packages import check_remote
from lengthwise.data import Batches, Dataset, Tokenizer, check_fits, check_positions, load_dataset, load_tokenizer
from lengthwise.data.feed_dataset import FeedDataset, FeedSteps, Steps, divided, longest_rows, streamed
from lengthwise.data.load import first_rows
from lengthwise.data.tokens import FIRST_ROWS
from lengthwise.engine.schedule import check_steps
from lengthwise.models import DTYPES, ModelSource, find_model, position_limit, refuse_image_files, trains_on_images
from lengthwise.models.stored_model import StoredModel
from lengthwise.models.weights import holds_weights
from lengthwise.planner import PACKED_DP
from lengthwise.run.caching import data_cache
from lengthwise.run.job import Job, RunStart
from lengthwise.run.resume import Resume
from lengthwise.session.settings import check_settings, cost_of
from lengthwise.session.stages import check_replicas
from lengthwise.setup import TrainedModel


def settle(config: RunConfig, *, gpus: int) -> tuple[RunConfig, Mapping[str, str]]:
    """Return the settings with these defaults, and the reasons of the defaults by key. Idempotent."""
    loads = _loads_weights(config)
    start = "LoRA" if config.lora is not None else "loaded weights" if loads else "fresh weights"
    rate = LORA_RATE if config.lora is not None else LOADED_RATE if loads else FRESH_RATE
    schedule = config.optimizer.schedule or ("cosine" if loads else "constant")
    warmup = LOADED_WARMUP if loads and schedule != "constant" else 0
    filled = {"lr": rate, "schedule": schedule, "warmup_steps": warmup}
    filled = {key: value for key, value in filled.items() if getattr(config.optimizer, key) is None}
    reasons = dict.fromkeys(filled, f"the default for {start}")
    if config.precision == "auto":
        reasons["precision"] = "the default on GPUs" if gpus else "the default on CPUs"
    precision = config.precision_on(gpus=gpus > 0)
    optimizer = config.optimizer.model_copy(update=filled)
    return config.model_copy(update={"precision": precision, "optimizer": optimizer}), reasons


def _loads_weights(config: RunConfig) -> bool:
    """Return whether the run starts from stored weights; a missing model is reported later."""
    if config.model == TINY_MODEL or config.weights == "fresh":
        return False
    folder = Path(config.model)
    return not folder.is_dir() or holds_weights(folder)


def prepare_job(
    start: RunStart,
    *,
    resume: Resume | None = None,
    one_batch: bool = False,
    before_model: Callable[[], None] = lambda: None,
) -> Job:
    """Find the model, read the data and check one against the other; raise all problems in one error.

    one_batch: True reads only one batch of a stream. before_model: function that is called before the model's modules
    are imported or made, which may start CUDA; until then forked processes may read data.
    """
    collector, ranks, (config, settled) = Collector(), start.ranks, settle(start.config, gpus=start.gpus)
    attempt = collector.attempt
    model = attempt(lambda: _source(config))
    tokenizer = cache(lambda: load_tokenizer(config.tokenizer_name))
    how: dict[str, Any] = {"timeout_seconds": start.timeout_seconds, "one_batch": one_batch}
    steps, known, eval_dataset = _read_data(config, model, tokenizer, attempt, **how)
    positions, capacity = position_limit(model.config) if model else None, config.capacity_tokens
    attempt(lambda: check_replicas(ranks, config.stages))
    sizes = {"ranks": max(1, ranks // config.stages), "stages": config.stages, "capacity_tokens": capacity}
    fits, datasets = partial(check_fits, **sizes, cuts=config.planner != PACKED_DP), [known, eval_dataset]
    for each in filter(None, datasets):
        if capacity != "auto" and config.offload is None:  # more fits with offload: see the session's `check_longest`
            attempt(partial(fits, each))
        if positions is not None:
            attempt(partial(check_positions, each, positions=positions))
        if model is not None and each.first_with_images is not None:
            attempt(partial(_check_images, config, model, each.name(each.first_with_images)))
    if config.train_towers and known is not None:
        attempt(partial(_check_towers, known))
    if steps is not None:
        attempt(lambda: check_steps(config.optimizer, steps.num_steps))
        attempt(lambda: resume and resume.check_within(steps.num_steps))
    before_model()
    trained = attempt(partial(_check_model, config, model, gpus=start.gpus, ranks=ranks)) if model else None
    collector.raise_all()
    assert model is not None, "a model that was not found must have been a problem"
    assert trained is not None, "a model that cannot be trained must have been a problem"
    assert steps is not None, "data that was not read must have been a problem"
    steps.check_losses()
    _check_eval_losses(eval_dataset)
    return Job(
        config=config,
        ranks=ranks,
        model=model,
        trained=trained,
        steps=steps,
        eval_dataset=eval_dataset,
        tokenizer=tokenizer() if tokenizer.cache_info().currsize else None,
        timeout_seconds=start.timeout_seconds,
        gpus=start.gpus,
        gpu_name=start.gpu_name,
        resume=resume,
        chosen=start.chosen or settled,
    )


def _read_data(
    config: RunConfig,
    model: ModelSource | None,
    tokenizer: Callable[[], Tokenizer],
    attempt: Callable[[Callable[[], Any]], Any],
    *,
    timeout_seconds: float,
    one_batch: bool,
) -> tuple[Steps | None, Dataset | None, Dataset | None]:
    """Return (steps of the run, rows known before the first, eval data), None for each that is missing or wrong."""
    vocab_size = getattr(model.text, "vocab_size", None) if model else None
    stored = data_cache(config.tokenizer_name, tokenizer, vocab_size, timeout_seconds)

    def read(sources: Sequence[DataSource], key: str) -> Dataset:
        ready = sources if stored is None else stored.prepared(sources, key)
        return load_dataset(ready, tokenizer=tokenizer, vocab_size=vocab_size, key=key)

    meanwhile, steps, served = config.data[0].comes_meanwhile and not one_batch, None, None
    first = partial(first_rows, config.data, tokenizer=tokenizer, vocab_size=vocab_size)
    if one_batch and config.data[0].streaming:
        known = attempt(partial(first, **config.global_batch.model_dump()))
    elif meanwhile:
        peeks = config.data[0].streaming and model is not None and trains_on_images(model.config)
        known = longest_rows(config.data, attempt(partial(first, sequences=FIRST_ROWS)) if peeks else None)
        served = attempt(lambda: _fed_dataset(config, tokenizer, vocab_size, sees=known.first_with_images is not None))
    else:
        known = attempt(partial(read, config.data, "data"))
    if served is not None:
        steps = FeedSteps(dataset=served, known=known, config=config)
    elif known is not None and not meanwhile:
        steps = attempt(lambda: Batches(known, config))
    held_out = config.eval.data if config.eval else ()
    return steps, known, attempt(partial(read, held_out, "eval.data")) if held_out else None


def _fed_dataset(
    config: RunConfig, tokenizer: Callable[[], Tokenizer], vocab_size: int | None, *, sees: bool
) -> FeedDataset:
    """Return the dataset of rows that are read during training, before any is read."""
    try:
        digest = tokenizer().digest() + tokenizer().template_digest()
    except ConfigError:  # the first text reports it
        digest = ""
    of_tokenizer = {"tokenizer_name": config.tokenizer_name, "vocab_size": vocab_size, "tokenizer_digest": digest}
    if config.data[0].streaming:
        return streamed(config.data, seed=config.seed, sees=sees, **of_tokenizer)
    check_remote()
    return divided(config.data, seed=config.seed, **of_tokenizer)


def _source(config: RunConfig) -> ModelSource:
    how: dict[str, Any] = {"quantization": config.quantization, "train_towers": config.train_towers}
    return find_model(config.model, weights=config.weights, **how)


def _check_towers(dataset: Dataset) -> None:
    """Refuse towers that would train without a row that they see."""
    if dataset.first_with_images is None:
        expected = f"rows with images, in a stream among its first {FIRST_ROWS}, not of `remote`"
        remedy = "Take train_towers out."
        raise ConfigError("train_towers", expected=expected, got="rows of text", remedy=remedy)


def _check_images(config: RunConfig, source: ModelSource, where: str) -> None:
    """Refuse a row with images where the run cannot train on it."""
    refuse_image_files(source.config, where)
    if config.stages > 1:
        remedy = "Take `stages` out: long rows are cut over ranks without it."
        raise DataError(where, expected="a row of text, for `stages`", got="one with images", remedy=remedy)


def stored_model(
    config: RunConfig, source: ModelSource, *, draws_both: bool = False, sees: bool = False
) -> StoredModel:
    """Return the model of a run for a session. draws_both: as in `build_adapted`. sees: True if rows have images."""
    return StoredModel(
        source=source,
        lora=config.lora,
        dtype=DTYPES[config.precision],
        seed=config.seed,
        whole_logits=config.loss == "whole",
        draws_both=draws_both,
        sees=sees,
    )


def session_options(config: RunConfig) -> dict[str, Any]:
    """Return a run's settings as keywords of `Session`."""
    given: dict[str, Any] = {name: getattr(config, name) for name in TrainingSettings.model_fields}
    costs = None if config.measurements in (MEASURE_AT_START, MEASURE_NOTHING) else config.measurements
    return {**given, "measurements": costs, "share_prefixes": "off"}


def _check_model(config: RunConfig, source: ModelSource, *, gpus: int, ranks: int) -> TrainedModel:
    stored = stored_model(config, source)
    stored.check()
    if not (gpus and source.weights and config.shard != "zero1"):  # otherwise ranks may read their own rows
        stored.check_room()
    options = {**session_options(config), "device": torch.device("cuda" if gpus else "cpu")}
    settings = check_settings(stored, config.optimizer, options)
    if options["measurements"] is not None:
        cost_of(settings, ranks)
    return settings.trained


def _check_eval_losses(dataset: Dataset | None) -> None:
    """Refuse eval data without a loss token at the start, not hours into the run."""
    if dataset is not None and not dataset.loss_tokens.any():
        remedy = "Give eval data with labels, or leave eval out."
        raise DataError("eval.data", expected="at least one token with a label", got="none", remedy=remedy)
