"""`lengthwise profile`: measure the parts of a step on this machine, and write a file of measurements for plans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lengthwise.cli.options import named_alike
from lengthwise.cli.output import plain_console, refuse_unwritable_file, write_atomically
from lengthwise.core.errors import Collector, ConfigError, OutputError
from lengthwise.core.names import counted
from lengthwise.core.sizes import MOST_RANKS, parse_tokens, read_whole
from lengthwise.report.figures import count, percent

if TYPE_CHECKING:
    from lengthwise.core.measurements import Measurements

_SHORTEST_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measure how long this machine takes for the parts of a step, and write a file for `plan` and `simulate
    --measurements`.

    The command runs the model's own layers, the optimizer step and the communication on random tokens; it needs no
    data. Without torchrun, it starts one process per rank; under torchrun, on several machines, it uses torchrun's
    processes and also measures the links between nodes.
    """

    model: Annotated[str, tyro.conf.arg(metavar="NAME|FOLDER")] = "tiny"
    """The model, as in a run file: tiny, or a Hugging Face folder or hub name. Its weights are not loaded."""
    ranks: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Processes to start on this machine, as many as will train; default: one per GPU, or 2 without GPUs. Not with
    torchrun."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """As in a run file."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """As in a run file."""
    seconds: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 8.0
    """About how many seconds to measure after the start; 60 measures longer sequences, and repeats every measurement
    more often."""
    longest: Annotated[str, tyro.conf.arg(metavar="TOKENS")] = "64K"
    """The longest sequence to measure (K = 1024); if time runs out, only shorter ones are measured."""
    clock: Literal["wall", "cpu"] = "wall"
    """The clock: wall, or cpu, which counts the seconds in which a rank computes or waits for messages, for machines
    that do other work at the same time (CPU ranks of one thread)."""
    hardware: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """The hardware whose costs replace those that cannot be measured here: h100, h200, a100, bytescale-gpu or cpu;
    default: cpu, on GPUs the one of the same name, else h100."""
    disk: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Also measure copies to and from a file in this folder, as with offload: {store: disk, path: DIR}; by default
    copies to host memory on GPUs."""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """Replace an earlier file."""
    out: Annotated[Path, tyro.conf.arg(metavar="MEASUREMENTS.json")]
    """The file of measurements to write (JSON)."""
    hardware_out: Annotated[Path | None, tyro.conf.arg(metavar="HARDWARE.json", help_behavior_hint="")] = None
    """Also write the device as a description that `--hardware` of `plan` and `simulate` takes, for other models: with
    what was measured here, and the rest from --hardware."""
    node_size: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Devices of a node in --hardware-out; default: those of --hardware."""

    def run(self) -> int:
        longest_tokens = self._read()

        from lengthwise.profiler.rank_profiler import ProfileSettings
        from lengthwise.run.profiling import profile_model

        settings = ProfileSettings(
            seconds=self.seconds,
            longest_tokens=longest_tokens,
            precision=self.precision,
            clock=self.clock,
            hardware=self.hardware or self._same_hardware(),
        )
        found = profile_model(self.model, settings, ranks=self.ranks, device=self.device, disk=self.disk)
        if found is None:  # a torchrun rank other than 0
            return 0
        write_atomically(self.out, found.to_json())
        print_measurements(found)
        plain_console().print(f"written to {self.out}")
        if self.hardware_out is not None:
            self._write_hardware(found, self.hardware_out)
        return 0

    def _same_hardware(self) -> str:
        """Return the named hardware of the measured device; print a note if it is another device."""
        from lengthwise.comm import count_gpus
        from lengthwise.cost import hardware_of_gpu
        from lengthwise.profiler.place import first_gpu_name

        if self.device == "cpu" or not count_gpus():
            return "cpu"
        name, said = hardware_of_gpu(first_gpu_name() or "a GPU")
        if said is not None:
            plain_console().print(f"costs that cannot be measured here are those of {name}")
        return name

    def _write_hardware(self, found: Measurements, path: Path) -> None:
        from lengthwise.cli.machine import memory_bytes
        from lengthwise.cost.described import hardware_from_measurements, hardware_to_json
        from lengthwise.profiler.place import device_bytes

        described = hardware_from_measurements(
            found,
            device_bytes=device_bytes() if found.place.device != "cpu" else None,
            host_bytes=memory_bytes(),
            ranks_per_node=self.node_size,
        )
        write_atomically(path, hardware_to_json(described))
        plain_console().print(f"hardware description written to {path}")

    def names(self) -> dict[str, str]:
        return named_alike("model ranks device precision clock hardware node_size")

    def _read(self) -> int:
        """Check the command line before torch is imported; return the longest sequence in tokens."""
        from lengthwise.core.names import unknown_name
        from lengthwise.cost import HARDWARE_NAMES

        problems = Collector()
        problems.attempt(lambda: self._check_out(self.out, "--out"))
        if self.hardware_out is not None:
            path = self.hardware_out
            problems.attempt(lambda: self._check_out(path, "--hardware-out"))
        elif self.node_size is not None:
            expected, remedy = "--hardware-out beside it", "Add it, or remove --node-size."
            problems.add(ConfigError("--node-size", expected=expected, got="none", remedy=remedy))
        problems.attempt(lambda: self.node_size is None or read_whole("node_size", self.node_size, most=MOST_RANKS))
        if self.disk is not None and not self.disk.is_dir():
            expected, got = "an existing folder", f"{self.disk}: {'a file' if self.disk.exists() else 'no such folder'}"
            problems.add(ConfigError("--disk", expected=expected, got=got, remedy="Correct the path."))
        problems.attempt(lambda: self.ranks is None or read_whole("ranks", self.ranks, most=MOST_RANKS))
        longest = problems.attempt(lambda: parse_tokens(self.longest, "--longest"))
        if not _SHORTEST_SECONDS <= self.seconds < float("inf"):
            expected, got = f"a number of seconds from {_SHORTEST_SECONDS}", str(self.seconds)
            problems.add(ConfigError("--seconds", expected=expected, got=got, remedy="Correct the number."))
        if self.hardware is not None and self.hardware not in HARDWARE_NAMES:
            problems.add(unknown_name("--hardware", self.hardware, HARDWARE_NAMES))
        problems.raise_all()
        assert longest is not None, "a wrong number of tokens must have been a problem"
        return longest

    def _check_out(self, path: Path, option: str) -> None:
        refuse_unwritable_file(path)
        if path.exists() and not self.overwrite:
            expected, remedy = "a new file", f"Choose another {option}, or add --overwrite."
            raise OutputError(str(path), expected=expected, got="an existing one", remedy=remedy)


def print_measurements(found: Measurements) -> None:
    """Print the fitted terms with their errors, and the terms that were not measured."""
    from lengthwise.core.measurements import HARDLY_KNOWN
    from lengthwise.report.tables import ColumnTable

    place, fit, console = found.place, found.fit, plain_console()
    console.print(
        f"model {found.model.name} in {found.precision}: {counted(place.ranks, 'rank')} of "
        f"{counted(place.threads, 'thread')} on {place.device} ({place.processor}), "
        f"{counted(len(found.samples), 'sample')}, {place.clock} clock"
    )
    rows = [("term", "value", "error")]
    for name, term in fit.terms.items():
        shown = f"{term.value:.3g} s" if name.endswith("_seconds") else percent(term.value)
        if name.endswith("bytes_per_second"):
            shown = f"{count(term.value)}B/s"
        rows.append((name, shown, "unknown" if term.relative_error is None else percent(term.relative_error)))
    console.print(ColumnTable(rows=rows, title="fitted (measured; error: standard error over value)"))
    if fit.not_measured:
        console.print(f"not measured, taken from {found.hardware}: {', '.join(fit.not_measured)}")
    if hardly := [name for name in fit.terms if name not in fit.known]:
        console.print(
            f"hardly known from these samples (an error over {percent(HARDLY_KNOWN)}), taken from {found.hardware}: "
            f"{', '.join(hardly)}"
        )
    spread = sorted(sample.spread for sample in found.samples)[len(found.samples) // 2]
    console.print(
        f"the costs miss microbatches by {percent(fit.mean_error)} on average, {percent(fit.worst_error)} at worst; "
        f"repeats differ by {percent(spread)} (median of quartiles)"
    )
