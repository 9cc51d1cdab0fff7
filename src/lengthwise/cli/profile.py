"""`lengthwise profile`: what this machine takes for the parts of a step, into a file that plans are priced with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lengthwise.cli.options import named_alike
from lengthwise.cli.output import plain_console, refuse_unwritable_file, write_atomically
from lengthwise.core.errors import Collector, ConfigError, OutputError
from lengthwise.core.sizes import MOST_RANKS, parse_tokens, read_whole
from lengthwise.report.figures import count, percent

if TYPE_CHECKING:
    from lengthwise.core.measurements import Measurements

_SHORTEST_SECONDS = 0.5
_HARDLY_KNOWN = 0.5  # the relative error of a term from which its samples say little of it


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measure what this machine takes for the parts of a step, and write it for `plan` and `simulate --measurements`.

    Runs the model's own layers, its step's end and its messages, on random tokens; needs no data. Alone it starts one
    process a rank; under torchrun, on several machines, it takes torchrun's and measures the links between nodes, too.
    """

    model: Annotated[str, tyro.conf.arg(metavar="NAME|FOLDER")] = "tiny"
    """The model, as in a run file: tiny, or a Hugging Face folder or hub name. Its weights are not loaded."""
    ranks: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Processes to start on this machine, as many as will train; default: one a GPU, else 2. Not with torchrun."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """As in a run file."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """As in a run file."""
    seconds: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 8.0
    """How long to measure, about, after the start; 60 measures longer sequences, and all more often."""
    longest: Annotated[str, tyro.conf.arg(metavar="TOKENS")] = "64K"
    """No sequence is longer (K = 1024); the time may end it sooner."""
    clock: Literal["wall", "cpu"] = "wall"
    """Which seconds count: wall, or cpu: those in which a rank computes or waits for messages, for machines that do
    other work at the same time (CPU ranks of one thread)."""
    hardware: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Whose terms stand where nothing can be measured here: h100, bytescale-gpu or cpu; default: cpu, on GPUs h100."""
    disk: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Also measure copies to and from a file in this folder, as with offload: {store: disk, path: DIR}; without, on
    GPUs those to the host's memory."""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """Replace an earlier file."""
    out: Annotated[Path, tyro.conf.arg(metavar="MEASUREMENTS.json")]
    """Where the measurements go (JSON)."""

    def run(self) -> int:
        """Run the command; return the exit status."""
        longest_tokens = self._read()

        from lengthwise.comm import count_gpus
        from lengthwise.profiler.profile import ProfileSettings
        from lengthwise.training.profiling import profile_model

        on_gpus = self.device != "cpu" and count_gpus() > 0
        settings = ProfileSettings(
            seconds=self.seconds,
            longest_tokens=longest_tokens,
            precision=self.precision,
            clock=self.clock,
            hardware=self.hardware or ("h100" if on_gpus else "cpu"),
        )
        found = profile_model(self.model, settings, ranks=self.ranks, device=self.device, disk=self.disk)
        if found is None:  # a torchrun rank other than 0
            return 0
        write_atomically(self.out, found.to_json())
        print_measurements(found)
        plain_console().print(f"written to {self.out}")
        return 0

    def names(self) -> dict[str, str]:
        """Map names of the library to what the user typed for them."""
        return named_alike("model ranks device precision clock hardware")

    def _read(self) -> int:
        """Check the command line before torch is imported; return the longest sequence in tokens."""
        from lengthwise.core.names import unknown_name
        from lengthwise.cost import HARDWARE_NAMES

        problems = Collector()
        problems.attempt(self._check_out)
        if self.disk is not None and not self.disk.is_dir():
            expected, got = "an existing folder", f"{self.disk}: {'a file' if self.disk.exists() else 'nothing there'}"
            problems.add(ConfigError("--disk", expected=expected, got=got, remedy="Correct the path."))
        problems.attempt(lambda: self.ranks is None or read_whole("ranks", self.ranks, most=MOST_RANKS))
        longest = problems.attempt(lambda: parse_tokens(self.longest, "--longest"))
        if not _SHORTEST_SECONDS <= self.seconds < float("inf"):
            expected, got = f"a number of seconds from {_SHORTEST_SECONDS}", str(self.seconds)
            problems.add(ConfigError("--seconds", expected=expected, got=got, remedy="Give such a number."))
        if self.hardware is not None and self.hardware not in HARDWARE_NAMES:
            problems.add(unknown_name("--hardware", self.hardware, HARDWARE_NAMES))
        problems.raise_all()
        assert longest is not None, "what is no number of tokens must have been a problem"
        return longest

    def _check_out(self) -> None:
        refuse_unwritable_file(self.out)
        if self.out.exists() and not self.overwrite:
            expected, remedy = "a new file", "Choose another --out, or add --overwrite."
            raise OutputError(str(self.out), expected=expected, got="one that is there", remedy=remedy)


def _sureness(relative_error: float | None) -> str:
    if relative_error is None:
        return "unknown"
    return percent(relative_error) + ", not told by these samples" * (relative_error > _HARDLY_KNOWN)


def print_measurements(found: Measurements) -> None:
    """Show the terms, how sure each is, and what was not measured."""
    from lengthwise.report.tables import ColumnTable

    place, fit, console = found.place, found.fit, plain_console()
    console.print(
        f"model {found.model.name} in {found.precision}: {place.ranks} ranks of {place.threads} "
        f"thread{'s' * (place.threads > 1)} on {place.device} ({place.processor}), {len(found.samples)} samples, "
        f"{place.clock} clock"
    )
    rows = [("term", "value", "error")]
    for name, term in fit.terms.items():
        shown = f"{term.value:.3g} s" if name.endswith("_seconds") else percent(term.value)
        if name.endswith("bytes_per_second"):
            shown = f"{count(term.value)}B/s"
        rows.append((name, shown, _sureness(term.relative_error)))
    console.print(ColumnTable(rows=rows, title="fitted (measured; error: standard error over value)"))
    if fit.not_measured:
        console.print(f"not measured, as of {found.hardware}: {', '.join(fit.not_measured)}")
    spread = sorted(each.spread for each in found.samples)[len(found.samples) // 2]
    console.print(
        f"the costs miss microbatches by {percent(fit.mean_error)} on average, {percent(fit.worst_error)} at worst; "
        f"repeats differ by {percent(spread)} (median of quartiles)"
    )
