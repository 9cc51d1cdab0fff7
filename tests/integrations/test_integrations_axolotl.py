"""axolotl's own command, plain in one process and planned on ranks, over the same file; and what the plugin refuses.

The first needs axolotl with its pins: `make test-axolotl`.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from trainers import difference

from lengthwise.core.errors import ConfigError, Problems
from lengthwise.integrations.axolotl_settings import REFUSED_KEYS, LengthwiseArgs

ROOT = Path(__file__).parents[2]
EXAMPLE = yaml.safe_load((ROOT / "examples" / "axolotl" / "sft.yaml").read_text())
OURS = ("plugins", "lengthwise")
needs_axolotl = pytest.mark.skipif(find_spec("axolotl") is None, reason="axolotl is not installed: make test-axolotl")


def test_a_file_is_taken_with_two_lines_more():
    assert [line for line in (ROOT / "examples/axolotl/sft.yaml").read_text().splitlines() if line.startswith(OURS)]
    assert LengthwiseArgs.model_validate(EXAMPLE).lengthwise == {"capacity_tokens": "auto"}
    assert LengthwiseArgs.model_validate({**EXAMPLE, "lengthwise": None, "context_parallel_size": 1}).lengthwise is None
    LengthwiseArgs.model_validate({**EXAMPLE, "sample_packing": True, "context_parallel": {"size": 1}})


def test_what_cannot_stand_beside_the_plugin_is_refused_in_one_message():
    wrong = dict.fromkeys(REFUSED_KEYS, 2)
    plugins = [*EXAMPLE["plugins"], "axolotl.integrations.liger.LigerPlugin"]
    section = {"capacity_tokens": 0, "shrad": "zero3", "recompute": "layer"}
    with pytest.raises(Problems) as raised:
        LengthwiseArgs.model_validate({**EXAMPLE, **wrong, "plugins": plugins, "lengthwise": section})
    inside = [f"lengthwise.{name}" for name in section]
    assert sorted(each.where for each in raised.value.problems) == sorted([*REFUSED_KEYS, "plugins", *inside])
    assert "Did you mean `shard`?" in str(raised.value)
    with pytest.raises(ConfigError, match=r"optimizer: expected adamw_torch or .*; got adamw_bnb_8bit, but a rank"):
        LengthwiseArgs.model_validate({**EXAMPLE, "optimizer": "adamw_bnb_8bit"})
    with pytest.raises(ConfigError, match="lengthwise: expected a mapping of keys; got on"):
        LengthwiseArgs.model_validate({**EXAMPLE, "lengthwise": "on"})


def test_the_guide_names_every_key_that_is_refused():
    page = (ROOT / "docs" / "guides" / "axolotl.md").read_text()
    assert [name for name in REFUSED_KEYS if f"`{name}`" not in page] == []


NO_EVAL = {"val_set_size": 0, "eval_strategy": None, "eval_steps": None}
TOKENS = {"datasets": [{"path": "runs/axolotl/tokens.jsonl", "ds_type": "json", "type": None}], **NO_EVAL}
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj"]}
CASES = {
    "chats": ({}, {}, (1, 2, 3)),
    "lora": (LORA, {}, (2,)),
    "tokens over zero3": (TOKENS, {"shard": "zero3"}, (2,)),
    "packs": (
        {**TOKENS, "sample_packing": True, "micro_batch_size": 2, "sequence_len": 384, "attn_implementation": "sdpa"},
        {},
        (2,),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a tiny model, chats, and rows of tokens."""
    found = tmp_path_factory.mktemp("axolotl")
    command([str(ROOT / "examples" / "axolotl" / "prepare.py")], found)
    rows = []
    for number in range(24):
        ids = [4 + (number * 31 + place * place) % 256 for place in range((17, 5, 90, 33)[number % 4] + number)]
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100, -100, *ids[2:]]})
    (found / "runs/axolotl/tokens.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return found


def command(words, folder):
    alone = {"ACCELERATE_USE_CPU": "true", "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled"}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words], cwd=folder, env={**os.environ, **alone, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def trained(folder, name, changes, section, ranks):
    """Run `axolotl.cli.train`; return what it logged, the weights that it saved, and all that it said."""
    plain = section is None
    batch = 6  # which 1, 2 and 3 ranks divide
    settings = {**EXAMPLE, "eval_batch_size": batch // ranks, **changes}
    if changes.get("sample_packing"):
        settings |= {"micro_batch_size": settings["micro_batch_size"] // ranks, "gradient_accumulation_steps": 1}
    else:
        settings["gradient_accumulation_steps"] = batch // ranks
    settings |= {"output_dir": f"out/{name}", "lengthwise": {"capacity_tokens": 800 // ranks, **(section or {})}}
    if plain:
        settings = {key: value for key, value in settings.items() if key not in OURS}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    said = command([*launch, "-m", "axolotl.cli.train", str(file)], folder)
    logs = [dict(re.findall(r"'([\w/]+)': '?([-\w.]+)'?", each)) for each in re.findall(r"\{'\w*loss'[^}]*\}", said)]
    (saved,) = (folder / "out" / name).glob("*model.safetensors")
    return logs, load_file(saved), said


@needs_axolotl
@pytest.mark.parametrize("case", CASES)
def test_planned_axolotl_trains_as_axolotl_in_one_process(folder, case):
    changes, section, all_ranks = CASES[case]
    name = case.replace(" ", "-")
    expected, weights, said = trained(folder, name, changes, None, 1)
    assert "is planned" not in said
    same = {"loss", "grad_norm", "learning_rate", "eval_loss", "ppl", "tokens/trainable"}
    for ranks in all_ranks:
        logs, found, said = trained(folder, f"{name}-{ranks}", changes, section, ranks)
        noun = "rank" if ranks == 1 else "ranks"
        assert f"every step of this run is planned, on {ranks} {noun}" in said
        assert len(logs) == len(expected) >= EXAMPLE["max_steps"]
        for ours, theirs in zip(logs, expected, strict=True):
            names = same & theirs.keys()
            assert names <= ours.keys()
            for each in names:
                assert float(ours[each]) == pytest.approx(float(theirs[each]), rel=1e-3), each  # four digits
        assert difference(found, weights) < 1e-4
