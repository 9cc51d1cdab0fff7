"""`lengthwise profile` on this device: measurements, and the description that `--hardware` takes, into the folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from gpu.models import model_config
from gpu.records import Records
from gpu.sizes import Sizes
from lengthwise.cli import main
from lengthwise.cost import named_hardware
from lengthwise.cost.measured import read_measurements

_KEYS = (
    *("peak_flops_per_second", "linear_efficiency", "attention_efficiency", "layer_launch_seconds"),
    *("copy_bytes_per_second", "device_bytes", "host_bytes"),
)


def profile(sizes: Sizes, records: Records) -> None:
    """Write rows `term` and `hardware`, and the files measurements.json and hardware.json.

    Raises:
        SystemExit: the command failed; its output is in the log.
    """
    measurements, hardware = records.folder / "measurements.json", records.folder / "hardware.json"
    with tempfile.TemporaryDirectory(prefix="lengthwise-profile-") as name:
        model = Path(name) / "model"
        model_config(sizes.profile_model).save_pretrained(model)
        command = ["profile", "--model", str(model), "--ranks", "1"]
        command += ["--device", sizes.device, "--precision", sizes.precision, "--overwrite"]
        command += ["--seconds", str(sizes.profile_seconds), "--longest", str(sizes.profile_tokens)]
        command += ["--out", str(measurements), "--hardware-out", str(hardware)]
        status = _here(command) if sizes.device == "cpu" else _in_a_process(command)
    if status:
        raise SystemExit(f"profile: status {status}")
    found = read_measurements(measurements)
    for term, fitted in found.fit.terms.items():
        records.add("term", term=term, value=fitted.value, relative_error=fitted.relative_error)
    described = named_hardware(str(hardware))
    records.add("hardware", name=found.place.device, **{key: getattr(described, key) for key in _KEYS})


def _here(arguments: list[str]) -> int:
    """Run the command in this process; return its exit status."""
    try:
        main(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 0


def _in_a_process(arguments: list[str]) -> int:
    """Run the command in a process of its own: one that has started CUDA cannot fork ranks."""
    return subprocess.run([sys.executable, "-m", "lengthwise", *arguments]).returncode
