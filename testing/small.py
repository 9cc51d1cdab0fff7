"""Small models and rows, and training written plainly with Hugging Face and torch: no code of ours is in it."""

import random
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from testing.tiny import SIZES

VOCAB = 64
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
UGLY = [[1, 2, 97, 3], [64, 65, 63, 1, 1, 31], [128, 5], [59, 2, 2, 2]]


def small_model(dtype=torch.float64, **changes):
    """Return a Llama of two layers; the same values each time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = LlamaConfig(**{**SIZES, "vocab_size": VOCAB, **changes})
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).train()


def write_model(folder, *, weights=True, seed=7, **changes):
    """Write such a model; without weights only its config.json."""
    config = LlamaConfig(**{**SIZES, "vocab_size": VOCAB, "tie_word_embeddings": False, **changes})
    if not weights:
        config.save_pretrained(folder)
        return folder
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():  # livelier than the initial 0.02, so that errors show
            parameter.data.mul_(3) if parameter.dim() > 1 else parameter.data.add_(torch.rand_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


def plain_model(folder, dtype):  # sdpa: the eager attention takes its softmax in fp32 whatever the dtype
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


def make_rows(lengths, *, seed=0):
    """Draw rows as a file has them, without labels."""
    choose = random.Random(seed)
    return [{"input_ids": [choose.randrange(VOCAB) for _ in range(length)]} for length in lengths]


def rows_of(lengths, seed):
    """Draw rows as a loop has them, some labels hidden, and one row more."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        labels = torch.where(torch.rand(length, generator=generator) < 0.3, -100, ids)
        rows.append({"input_ids": ids, "labels": labels})
    rows[0]["labels"] = rows[0]["input_ids"].clone()
    rows.append({"input_ids": torch.arange(9) % VOCAB, "labels": torch.arange(9) % VOCAB})
    return rows


def steps_of(lengths=UGLY):
    return [rows_of(each, seed) for seed, each in enumerate(lengths)]


def loss_tokens(rows):
    """Count the tokens that have a loss, or sum their weights."""
    found = 0
    for row in rows:
        if "weights" in row:
            found += torch.tensor(row["weights"])[1:].double().sum().item()
        else:
            found += int((torch.as_tensor(row.get("labels", row["input_ids"]))[1:] != -100).sum())
    return found


def plain_losses(model, rows, *, dtype=torch.float64, autocast=None):
    """Yield the summed loss of each row, alone: position t says t + 1, -100 says nothing. Rows may have images."""
    for row in rows:
        ids = torch.as_tensor(row["input_ids"])
        labels = torch.as_tensor(row.get("labels", ids))[1:]
        with nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast):
            images = {
                name: row[name]
                for name in ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids")
                if name in row
            }
            for name in ("mm_token_type_ids", "token_type_ids"):
                if name in row:
                    images[name] = row[name][None]
            logits = model(input_ids=ids[None], use_cache=False, **images).logits[0, :-1]
        losses = F.cross_entropy(
            logits.to(torch.promote_types(dtype, torch.float32)), labels, ignore_index=-100, reduction="none"
        )
        yield (losses * torch.tensor(row["weights"])[1:].to(losses) if "weights" in row else losses).sum()


def plain_loss(model, rows, dtype):
    """Return the mean loss of rows."""
    with torch.no_grad():
        return sum(each.item() for each in plain_losses(model, rows, dtype=dtype)) / loss_tokens(rows)


def plain_loop(model, optimizer, scheduler, steps, *, limit=1.0, beside=None, **how):
    """Train one row after the other; return (loss, norm before clipping) of each step.

    beside: a loss of the model and a step's number, added to that of the tokens.
    """
    found = []
    for number, rows in enumerate(steps):
        total, divisor = 0.0, loss_tokens(rows)
        for loss in plain_losses(model, rows, **how):
            (loss / divisor).backward()
            total += loss.item() / divisor
        if beside is not None:
            beside(model, number).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append((total, norm))
    return found


def plain_training(model, rows, steps, *, dtype, lrs, beside=None):
    """Train as a run file does by default; return (losses, gradient norms before clipping, model).

    model: or its folder. steps: the numbers of their rows. beside: a loss of the model and of these.
    """
    model = model if isinstance(model, torch.nn.Module) else plain_model(model, dtype)
    groups = [
        {"params": [each for each in model.parameters() if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [*lrs, 0.0].__getitem__)
    how = {"beside": beside and (lambda model, number: beside(model, steps[number])), "dtype": dtype}
    found = plain_loop(model, optimizer, scheduler, [[rows[i] for i in ids] for ids in steps], **how)
    return *map(list, zip(*found, strict=True)), model


def relative(got, expected):
    return abs(got - expected) / abs(expected)
