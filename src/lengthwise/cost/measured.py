"""Costs of a measured machine: a file of `lengthwise profile` becomes a `Cost`, or is refused.

Terms that were not measured come from the file's hardware. Nothing is scaled to another model, precision or number of
threads.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lengthwise.config.problems import expected_value, shown
from lengthwise.core.errors import ConfigError, LengthwiseError, raise_problems
from lengthwise.core.files import read_json
from lengthwise.core.measurements import ARITHMETIC, SCHEMA, Measurements, Term, TermName
from lengthwise.core.names import did_you_mean
from lengthwise.core.shape import ModelShape
from lengthwise.cost.all_terms import all_terms_cost
from lengthwise.cost.fit import with_curves, with_terms
from lengthwise.cost.hardware import HARDWARE_NAMES, named_hardware
from lengthwise.cost.memory import DTYPE_BYTES
from lengthwise.cost.terms import Cost

_MOST_SECONDS, _MOST_BYTES = 1e6, 1e18  # limits of plausible seconds per token or step, and bytes per second
_OF_ALL_LAYERS = frozenset(
    (
        *("quadratic_seconds", "linear_seconds", "fixed_seconds", "near_hop_seconds", "far_hop_seconds"),
        *("update_seconds", "clear_seconds"),
    )
)
_REMEDY = "Profile again; `lengthwise profile` writes such a file."


def read_measurements(path: str | Path) -> Measurements:
    """Read a file of measurements.

    Raises:
        ConfigError: not a JSON object of this schema, or an unknown, missing or wrong value; names file and key.
        Problems: several of these.
    """
    where = str(path)
    try:
        raw = read_json(path)
    except ValueError as error:
        raise ConfigError(where, expected="a JSON file", got=str(error), remedy=_REMEDY) from None
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        got = shown(raw.get("schema")) if isinstance(raw, dict) else type(raw).__name__
        raise ConfigError(where, expected=f'an object with "schema": "{SCHEMA}"', got=got, remedy=_REMEDY)
    try:
        found = TypeAdapter(Measurements).validate_json(json.dumps(raw))
    except ValidationError as error:
        raise_problems(_problems(error, where))
        raise
    except ConfigError as error:  # of the model's sizes
        raise ConfigError(f"{where}: {error.where}", expected=error.expected, got=error.got, remedy=_REMEDY) from None
    raise_problems(_contradictions(found, where))
    return found


def base_cost(
    shape: ModelShape,
    hardware: str,
    *,
    precision: str,
    ranks_per_node: int | None = None,
    adapters: int | None = None,
    stages: int = 1,
    quantization: str | None = None,
) -> Cost:
    """Return the costs of a named hardware in this precision, for terms that were not measured.

    ranks_per_node: ranks of the measured nodes, whose uplinks grow with it (default: the hardware's own). adapters,
    stages, quantization: arguments of `all_terms_cost`.
    """
    computing = replace(named_hardware(hardware).in_nodes(ranks_per_node), compute_dtype_bytes=DTYPE_BYTES[precision])
    return all_terms_cost(shape, computing, adapters=adapters, stages=stages, quantization=quantization)


def measured_cost(measurements: Measurements, *, stages: int = 1) -> Cost:
    """Return the costs of the measured model and machine; of one pipeline stage, if cut evenly into `stages`."""
    shape, place = measurements.model, measurements.place
    base = base_cost(
        shape,
        measurements.hardware,
        precision=measurements.precision,
        ranks_per_node=place.ranks_per_node,
        adapters=measurements.adapters,
        stages=stages,
    )
    fit = measurements.fit
    base = replace(
        with_curves(base, fit.block_efficiency, fit.ring_efficiency),
        version=f"measured/1 {shape.name} {place.device} {measurements.digest()[:12]}",
    )
    terms: dict[TermName, Term] = {
        name: replace(term, value=term.value / stages) if name in _OF_ALL_LAYERS else term
        for name, term in fit.known.items()
    }
    return with_terms(base, terms)


def cost_from_measurements(
    path: str | Path,
    shape: ModelShape,
    *,
    precision: str,
    threads: int | None = None,
    adapters: int | None = None,
    on_gpus: bool | None = None,
    stages: int = 1,
) -> Cost:
    """Return the costs of a run from a file of measurements.

    Args:
        path: path of the file.
        shape: shape of the run's model; its name may differ.
        precision: precision of the run.
        threads: number of each rank's threads; None to skip the check.
        adapters: number of parameters that train in place of the model's own; None if all train.
        on_gpus: True if the run computes on GPUs; None to skip the check.
        stages: stages of the run's pipelines.

    Raises:
        ConfigError: the file cannot be read, or has another model, precision, number of threads or kind of device.
        Problems: several of these.
    """
    found = read_measurements(path)
    raise_problems(
        misfits(found, str(path), shape, precision=precision, threads=threads, adapters=adapters, on_gpus=on_gpus)
    )
    return measured_cost(found, stages=stages)


def misfits(
    found: Measurements,
    where: str,
    shape: ModelShape,
    *,
    precision: str,
    threads: int | None = None,
    adapters: int | None = None,
    on_gpus: bool | None = None,
) -> list[LengthwiseError]:
    """Return the differences between measurements and a run that make them useless for it."""
    remedy = "Profile this model as it will run, or leave {measurements} out."
    of_run, of_file = asdict(shape), asdict(found.model)
    wanted: dict[str, tuple[Any, Any]] = {
        f"model: {name}": (of_run[name], of_file[name]) for name in of_run if name not in ("name", "family")
    }
    wanted["precision"] = (precision, found.precision)
    wanted["adapters"] = (_trained(adapters), _trained(found.adapters))
    if on_gpus is not None:
        wanted["place: device"] = ("a GPU" if on_gpus else "cpu", "cpu" if found.place.device == "cpu" else "a GPU")
    if threads is not None:
        wanted["place: threads"] = (threads, found.place.threads)
    return [
        ConfigError(f"{where}: {name}", expected=f"{expected}, as in the run", got=str(got), remedy=remedy)
        for name, (expected, got) in wanted.items()
        if expected != got
    ]


def _trained(adapters: int | None) -> str:
    return "all of the model trained" if adapters is None else f"adapters of {adapters} parameters trained"


def _problems(error: ValidationError, where: str) -> list[ConfigError]:
    problems = []
    for detail in error.errors(include_url=False):
        key = ".".join(map(str, detail["loc"]))
        missing = detail["type"] == "missing"
        remedy = _REMEDY
        if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            expected, got = "a known key", f"`{detail['loc'][-1]}`"
            remedy = did_you_mean(detail["loc"][-1], _keys(detail["loc"])) or "Take it out."
        else:
            expected, got = expected_value(detail), "nothing" if missing else shown(detail["input"])
        problems.append(ConfigError(f"{where}: {key}", expected=expected, got=got, remedy=remedy))
    return problems


def _keys(loc: tuple[int | str, ...]) -> list[str]:
    schema = TypeAdapter(Measurements).json_schema()
    part: dict[str, Any] = schema
    for name in loc[:-1]:
        part = part.get("items", {}) if isinstance(name, int) else part.get("properties", {}).get(name, {})
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
    return list(part.get("properties", {}))


def _contradictions(found: Measurements, where: str) -> list[LengthwiseError]:
    problems: list[LengthwiseError] = []

    def refuse(key: str, expected: str, got: object) -> None:
        problems.append(ConfigError(f"{where}: {key}", expected=expected, got=repr(got), remedy=_REMEDY))

    terms, missing = set(found.fit.terms), set(found.fit.not_measured)
    if both := sorted(terms & missing):
        refuse("fit.not_measured", "only terms without a value", both)
    if neither := sorted({*ARITHMETIC} - terms):
        refuse("fit.terms", "at least quadratic_seconds, linear_seconds and fixed_seconds", f"no {', '.join(neither)}")
    values = {name: term.value for name, term in found.fit.terms.items()}
    if not neither and not any(values[name] for name in ARITHMETIC):
        refuse("fit.terms", f"at least one coefficient above 0 of {', '.join(sorted(ARITHMETIC))}", 0.0)
    for name, value in values.items():
        if name.startswith("forward") and not value < 1:
            refuse(f"fit.terms.{name}.value", "a share below 1", value)
        if name.endswith("bytes_per_second") and not 0 < value < _MOST_BYTES:
            refuse(f"fit.terms.{name}.value", f"more than 0 and less than {_MOST_BYTES:.0e} bytes a second", value)
        elif value > _MOST_SECONDS and not name.endswith("bytes_per_second"):
            refuse(f"fit.terms.{name}.value", f"at most {_MOST_SECONDS:.0e} seconds", value)
    if found.hardware not in HARDWARE_NAMES:
        refuse("hardware", f"one of {', '.join(HARDWARE_NAMES)}", found.hardware)
    elif not problems:
        try:
            fit = found.fit
            curves = {"block_efficiency": fit.block_efficiency or ((1.0, 1.0),), "ring_efficiency": fit.ring_efficiency}
            replace(named_hardware(found.hardware), **curves)
            measured_cost(found)
        except LengthwiseError as error:
            refuse("fit", "terms that give valid costs", str(error))
    return problems
