"""Hold what is trained against plain Hugging Face and against itself: `make families`.

    python benchmarks/families.py [--out docs/families.md] [model_type ...]
    python benchmarks/families.py --losses [--out docs/benchmarks/same_losses.md]

Every causal-LM class of the installed transformers, and the models with towers that train on text: each tiny model runs
in a process of its own (some allocate gigabytes whatever their config says): loss and every gradient of eight
documents, packed and cut over rings of 1, 2, 3 and 5 ranks, in fp64, without and with activation checkpointing, against
the plain model one document at a time. A family that is not in `core/families.json` is only refused, and its row says
by which layer and what would be needed; named on the command line it is tried past the refusal, which is how a proof
begins.

With --losses: `lengthwise train` on the Python standard library's files, the tiny model in fp32, the same seed, on 1, 2
and 3 ranks and by two planners. A rank holds as many tokens as its share of the longest file, so with more than one
nearly all files are cut over rings, by every planner otherwise. The loss of a step depends on all updates before it, so
wrong gradients would show. What differences there are come from fp32 sums in another order. It takes some minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import transformers
from testing import (
    MODEL_TYPES,
    TOWER_PAIRS,
    VARIANTS,
    build_pair,
    family_difference,
    tiny_family_config,
    tiny_tower_config,
)
from transformers import AutoConfig, PretrainedConfig

from lengthwise.attention.abilities import LEAST_CUDNN, GpuAbilities, obstacle, order_of
from lengthwise.core.errors import LengthwiseError
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.models import FAMILIES, check_model_config, text_config
from lengthwise.models.computing import attention_needs
from lengthwise.models.families import reasons
from lengthwise.planner import PlanOptions, plan_step
from pages import Findings, markdown

LENGTHS, RANKS, MEMORY_BYTES, SECONDS = (1, 57, 2, 40, 5, 31, 11, 8), (1, 2, 3, 5), 6 << 30, 600
COST = Cost(quadratic_seconds=1.0, linear_seconds=100.0)
RUNS = ((1, "lengthwise"), (2, "lengthwise"), (2, "static"), (3, "lengthwise"), (3, "static"))
STEPS, LONGEST = 5, 1024
GPUS = ((8, 0), (9, 0))  # compute capabilities of A100 and H100, the latter without FlashAttention-3's package
CHECKPOINTS = {  # what people look for: the `model_type` in its config.json
    "Qwen3.5 and 3.6, dense: Qwen3.5-9B": ("qwen3_5",),
    "Qwen3.5 and 3.6, with experts: Qwen3.5-35B-A3B": ("qwen3_5_moe",),
    "Qwen3, Qwen2.5: Qwen3-8B": ("qwen3", "qwen2"),
    "Qwen3 with experts: Qwen3-30B-A3B": ("qwen3_moe",),
    "Qwen3-Next": ("qwen3_next",),
    "Qwen3-VL, Qwen2.5-VL": ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl"),
    "Gemma 4": ("gemma4", "gemma4_unified"),
    "Gemma 3 from 4B: gemma-3-12b-it": ("gemma3",),
    "Gemma 3 1B and 270M": ("gemma3_text",),
    "Gemma 3n": ("gemma3n",),
    "Gemma 2": ("gemma2",),
    "gpt-oss-20b, gpt-oss-120b": ("gpt_oss",),
    "Llama 3.x": ("llama",),
    "Llama 4": ("llama4",),
    "Mistral Small 3.1 and 3.2, Ministral 3": ("mistral3",),
    "Mistral 7B, Mistral Nemo, Mixtral": ("mistral", "mixtral"),
    "Kimi K2.5": ("kimi_k25",),
    "Kimi Linear": ("kimi_linear",),
    "DeepSeek-V3, R1": ("deepseek_v3",),
    "DeepSeek-V3.2": ("deepseek_v32",),
    "GLM-4.5 to 4.7, GLM-4.7-Flash": ("glm4_moe", "glm4_moe_lite"),
    "GLM-4.1V, GLM-4.5V, GLM-4.6V": ("glm4v", "glm4v_moe", "glm46v"),
    "InternVL3 in Transformers' format": ("internvl",),
    "Nemotron 3 Nano, Nemotron-H": ("nemotron_h",),
    "Granite 4 hybrids": ("granitemoehybrid",),
    "LFM2: LFM2-2.6B, LFM2-8B-A1B": ("lfm2", "lfm2_moe"),
    "LFM2-VL": ("lfm2_vl",),
    "OLMo 3": ("olmo3",),
    "OLMo Hybrid": ("olmo_hybrid",),
    "Phi-4": ("phi3",),
    "Phi-4-multimodal": ("phi4_multimodal",),
    "MiniMax-M2": ("minimax_m2",),
    "Voxtral": ("voxtral",),
    "PaliGemma": ("paligemma",),
}


def proof(label: str) -> str:
    """Return the row of a family or variant that is computed and compared."""
    model_type, changes = VARIANTS.get(label, (label, {}))
    try:
        whole = TOWER_PAIRS.get(label)
        config = tiny_tower_config(*whole) if whole else tiny_family_config(model_type, changes)
        pair = build_pair(model_type, config)
        kinds = ", ".join(sorted(set(getattr(text_config(config), "layer_types", None) or ())))
        cells = [worst(pair, recompute) for recompute in ("none", "layer")]
    except Exception as error:  # noqa: BLE001 - plain Hugging Face itself may not run this config
        return f"| {label} | not run: {type(error).__name__}: {short(error)} | | |"
    return f"| {label} | {cells[0]} | {cells[1]} | {kinds} |"


def worst(pair: dict[str, torch.nn.Module], recompute: str) -> str:
    """Return the largest differences over all rank counts, or by what the model was stopped."""
    losses, gradients = [0.0], [0.0]
    for ranks in RANKS:
        cluster = Cluster(ranks=ranks, capacity_tokens=-(-max(LENGTHS) // ranks) + 1)
        plan = plan_step(LENGTHS, cluster, COST, PlanOptions(layers=2, recompute=recompute))
        try:
            found = family_difference(pair, plan, LENGTHS, precision="fp64")
        except LengthwiseError as error:
            return f"refused: {short(error)}"
        losses += [found.loss, found.router_loss]
        gradients.append(found.gradient)
    loss, gradient = max(losses), max(gradients)
    return f"{'' if loss <= 1e-13 and gradient <= 1e-12 else '**DIFFERS** '}{loss:.0e} / {gradient:.0e}"


def refusal(model_type: str) -> str:
    """Return the rows of a family that is refused: one for each reason."""
    try:
        config = AutoConfig.for_model(model_type)
    except Exception:  # noqa: BLE001 - a few have no valid default
        config = PretrainedConfig()
        config.model_type = model_type  # pyright: ignore[reportAttributeAccessIssue] - one instance, not the class
    try:
        check_model_config(config)
    except LengthwiseError:
        return "\n".join(
            f"| {model_type} | {where} | {cell(what)} | {cell(needed)} |" for where, what, needed in reasons(config)
        )
    return f"| {model_type} | **NOT REFUSED** | | |"


def checkpoint(name: str) -> str:
    """Return the row of what people look for: whether it trains, and why not."""
    kinds, answers = CHECKPOINTS[name], []
    for kind in kinds:
        config = AutoConfig.for_model(kind)
        try:
            check_model_config(config)
            answers.append("yes" if text_config(config) is config else "yes, its text part")
        except LengthwiseError:
            answers.append(f"no ({'; '.join(cell(what) for _, what, _ in reasons(config))}): use plain TRL")
    assert len(set(answers)) == 1, f"a row each for {kinds}"
    kernels = attention_cell(kinds) if answers[0].startswith("yes") else ""
    return f"| {name} | {', '.join(f'`{kind}`' for kind in kinds)} | {answers[0]} | {kernels} |"


def attention_cell(kinds: Iterable[str]) -> str:
    """Return what `attention: auto` takes for families on `GPUS`, once where they do not differ."""
    found = {kind: kernels(AutoConfig.for_model(kind)) for kind in kinds}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return "; ".join(f"`{kind}`: {each}" for kind, each in found.items())


def kernels(config: PretrainedConfig) -> str:
    """Return the names of the kernels for a config on `GPUS`, by the code that chooses in a run."""
    needs, names = attention_needs(config, torch.bfloat16), []
    for capability in GPUS:
        gpu = GpuAbilities(capability=capability, torch_flash=True, cudnn=LEAST_CUDNN)
        names.append(next(name for name in order_of(capability) if obstacle(name, gpu, needs) is None))
    return " / ".join(f"`{name}`" for name in names)


def in_a_process(row: Callable[[str], str], label: str) -> str:
    """Make a row where it can do no harm."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        signal.alarm(SECONDS)
        os.write(theirs, row(label).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return text or f"| {label} | not run: its process ended with status {status} | | |"


def short(error: Exception) -> str:
    return cell(" ".join(str(getattr(error, "got", error)).split())[:100])


def cell(text: str) -> str:
    return text.replace("|", "/")


def losses_rows() -> Iterator[list[object]]:
    """Train every run and yield its row."""
    first: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks, planner in RUNS:
            steps = train(Path(folder), ranks, planner)
            losses = [step["loss"] for step in steps]
            first = first or losses
            difference = max(abs(loss / of_one - 1) for loss, of_one in zip(losses, first, strict=True))
            rings = sum(step["ring_token_ratio"] * step["num_tokens"] for step in steps)
            share = rings / sum(step["num_tokens"] for step in steps)
            yield [ranks, planner, f"{share:.0%}", f"{losses[0]:.6f}", f"{losses[-1]:.6f}", f"{difference:.0e}"]


def train(folder: Path, ranks: int, planner: str) -> list[dict[str, float]]:
    """Run `lengthwise train`; return the lines of its metrics."""
    config = folder / f"{planner}-{ranks}.yaml"
    config.write_text(
        f"model: tiny\ndata: [{{python_stdlib: true, max_tokens: {LONGEST}, too_long: skip}}]\nsteps: {STEPS}\n"
        f"global_batch: {{tokens: {4 * LONGEST}}}\ncapacity_tokens: {-(-LONGEST // ranks) + 1}\n"
        f"planner: {planner}\noutput: {config.stem}\n"
    )
    command = [sys.executable, "-m", "lengthwise", "train", str(config), "--ranks", str(ranks)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / config.stem / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Print the tables, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--losses", action="store_true", help="of one run on other ranks and by other planners")
    parser.add_argument("model_types", nargs="*")
    arguments = parser.parse_args()
    if arguments.losses:
        findings = Findings("same_losses")
        heads = "ranks | planner | tokens in rings | loss of the first step | of the last"
        findings.add(markdown(f"{heads} | largest relative difference", losses_rows()))
        told = f"{STEPS} steps, tiny model, fp32; differences from the first row"
        findings.sign("Measured", told, arguments.out)
        return
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    asked, wrappers = arguments.model_types, {pair[0] for pair in TOWER_PAIRS.values()}
    proved = asked or sorted([*VARIANTS, *(name for name in FAMILIES if name in MODEL_TYPES)])
    whole = [label for label in sorted(TOWER_PAIRS) if not asked or {label, TOWER_PAIRS[label][0]} & {*asked}]
    known = {*FAMILIES, *VARIANTS, *TOWER_PAIRS, *wrappers}
    refused = [name for name in asked or MODEL_TYPES if name not in known]
    proofs = made(proof, [each for each in proved if each not in {*TOWER_PAIRS, *wrappers}])
    with_towers = made(proof, whole)
    refusals = made(refusal, refused)
    if arguments.out:
        arguments.out.write_text(page(made(checkpoint, CHECKPOINTS), proofs, with_towers, refusals), encoding="utf-8")


def made(row: Callable[[str], str], labels: Iterable[str]) -> list[str]:
    rows = []
    for label in labels:
        rows.append(in_a_process(row, label))
        print(rows[-1], flush=True)
    return rows


def page(checkpoints: list[str], proofs: list[str], with_towers: list[str], refusals: list[str]) -> str:
    """Put the tables on their page."""
    versions = f"transformers {transformers.__version__} and torch {torch.__version__}"
    families = sum(name in MODEL_TYPES for name in FAMILIES)
    return (
        f"""# Model families

Made by `make families` on {datetime.date.today()} with {versions}, on CPU.

Of the {len(MODEL_TYPES)} causal-LM families of this transformers, {families} are proved equal to plain Hugging Face and
trained; every other one is refused by name before a run starts.

Some settings in a config are refused by their key, too. Published quantised weights (`quantization_config`: FP8, MXFP4,
INT4) are refused: take their bfloat16 version.

| model | `model_type` in its config.json | trained | attention on A100 / H100 |
|---|---|---|---|
"""
        + "\n".join(checkpoints)
        + f"""

The last column is the choice of `attention: auto` in bf16 for the family's default config, by the code that chooses at
a run's start. It was not run on a GPU ([more](gpu.md#what-a-run-does-there)).

- `flash2`: torch's flash attention in its varlen form, with all documents of a rank in few calls a layer. Heads may
  have up to 256 values (with latent attention, those of keys). An H100 with FlashAttention-3's package takes that
  package instead.
- `cudnn`: cuDNN for long documents and ring blocks, `flash2` for the others. Heads may have up to 128 values, so a
  checkpoint with smaller heads than its family's default (gemma-3-27b-it, 128) takes it on an H100, too.
- `efficient`: torch's efficient attention, block by block and slower, in all layers of a model with heads over 256
  (Gemma 4's layers without a window have 512). `plan` and `simulate` price it at the speed of flash attention.
- `reference`: plain matrix products in fp32, which are slow; no fused kernel here caps scores. `plan` and `simulate`
  price it at the speed of flash attention, too.

## Loaded in bf16

`from_pretrained` in bf16 keeps weights of routers or states in fp32 for some models: DeepSeek-V3, GLM-4.5 to 4.7 and
GLM-4.5V, Kimi K2.5 and Kimi Linear, Nemotron 3 Nano, OLMo Hybrid. `Session` and the trainers refuse such a model,
because weights that train are of one dtype. Load it with `dtype=torch.float32` and give `Session` `precision="bf16"`, a
trainer `bf16=True`; or call `model.to(torch.bfloat16)`. Run files, and TRL's trainers with a name, load in fp32.

## A checkpoint with a tower

A checkpoint with a tower for images or sounds (google/gemma-3-12b-it is `Gemma3ForConditionalGeneration`) trains on
rows of text. In a run file write `model: google/gemma-3-12b-it`; pass the model of
`AutoModelForImageTextToText.from_pretrained` to `Session`, Trainer or TRL's SFTTrainer, the trainers with its processor
or its tokenizer. The whole model runs, as in Hugging Face. Only its decoder and head train:

- The tower, and the layers from it to the decoder, are not updated, not decayed and in no rank's slice, even if
  `requires_grad` is set and the optimizer has them. A run keeps them in the memory of rank 0's host, which saves them;
  a session leaves them where they are.
- The model is saved whole, in its own class, so `AutoModelForImageTextToText.from_pretrained(FOLDER)` opens it. A run
  copies the processor's files (`preprocessor_config.json` and others) beside the tokenizer, and saves the tower in the
  precision of the rest.
- Weights that Hugging Face's class skips when it loads are not saved: Qwen3.5's heads for several tokens (`mtp.`).
- LoRA of a run file adapts the text part alone, and its saved adapter opens on the whole model. peft's `all-linear` in
  a loop of your own also puts adapters on the tower: these do not change.
- In some families rows with [images](guides/images.md) train, in trainers and Session. Everywhere else a row with the
  token of an image, a video or a sound (`image_token_id` and others in config.json) is refused by its name.
- If the family has a class for text alone (Qwen3.5), you can load the checkpoint with it, too; the saved model then has
  no tower.

## Proved

The largest relative differences, loss / gradient (L2 a tensor), between plans of {", ".join(map(str, RANKS))} ranks
and the plain Hugging Face model that runs one document at a time, in fp64. The model is tiny and random, with the
family's windows, sinks, experts and kinds of layers; plans pack eight documents and cut them over rings, without and
with activation checkpointing (`recompute: layer`). The tests hold every family to 1e-13 / 1e-12. Dropout of hidden
states, in families that have it (biogpt, ctrl, gpt-sw3, gpt2, gpt_bigcode, gpt_neox, opt, persimmon, phi, phi3,
seed_oss, starcoder2), is drawn by torch's generator ([how](decisions/dropout-follows-the-plan.md)). Dropout inside
of attention must be 0 in `config.json`.

Rows with *router loss* have `output_router_logits: true` in the config and a coefficient of 0.5: the gradients are
those of both losses, and the loss is the worse of the two. A family without such a row has no balance loss in Hugging
Face, and a config of it that asks for one is refused.

Layers with states (gated delta rule, KDA, Mamba 2) and short convolutions begin anew at each document. For their part
of a cut sequence they get the state, or the tokens before it, from other ranks ([how](decisions/states-by-sweep.md)).
In the models of this table their weights decay slowly, so that a state has an effect to the end.

In families with multi-head latent attention (deepseek, minicpm3, youtu, longcat and others) Hugging Face makes the keys
of every head before attention, and pads values that are smaller than keys with zeros. So a ring transfers as much as
for full attention with the same number of heads (DeepSeek-V3: 2 x 128 x 192 numbers a token and layer, of which a sixth
are zeros), not the 576 of the latent.

Families that cap their attention scores by tanh (gemma2, vaultgemma) are exact under every plan, too. On GPUs the
package flash-attn, if it is installed, computes them in one fused kernel in bf16 ([how](gpu.md#what-a-run-does-there)).
Without it `attention: auto` takes plain matrix products in fp32, which are slow, and a run prints this at its start.
torch's flash attention, cuDNN and efficient attention do not cap scores. By formula `plan` and `simulate` predict a
fused kernel's time for these models; `lengthwise profile` measures yours.

| family | loss / gradient | with checkpointing | kinds of layers |
|---|---|---|---|
"""
        + "\n".join(proofs)
        + """

For models with a tower the first column has the whole model's class and the family of its text part. Gradients are
those of the text part.

| model, text part | loss / gradient | with checkpointing | kinds of layers |
|---|---|---|---|
"""
        + "\n".join(with_towers)
        + """

## Refused

For each family the table names the first layer of the refused kind in its default config, or the config entry, and what
support would need.

| family | layer or config entry | what it is | needed |
|---|---|---|---|
"""
        + "\n".join(refusals)
        + "\n"
    )


if __name__ == "__main__":
    main()
