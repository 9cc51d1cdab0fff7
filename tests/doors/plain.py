"""The training that every door is compared with: Hugging Face and torch.optim, one process, one sequence at a time.

No code of lengthwise is in it, so that no mistake is on both sides.
"""

import random
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from testing.small import VOCAB, write_model
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

LR, DECAY, BETAS, EPS, LIMIT = 1e-2, 0.1, (0.9, 0.95), 1e-8, 1.0
STEP_LENGTHS = ((1, 2, 97, 3, 40, 17, 9, 12, 5, 1, 7, 2), (65, 23, 2, 90, 11, 30, 8, 1, 4, 3, 2, 5))
EVAL_LENGTHS = (7, 1, 101, 9)
MODELS = {"whole": {}, "tied": {"tie_word_embeddings": True}, "adapters": {}}


def norm_as_given(self, hidden):
    """What LlamaRMSNorm computes, without its step down to fp32, in which two exact trainings would differ."""
    return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)


def keep_precision(monkeypatch):
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_as_given)


def make_rows(lengths, seed):
    choose = random.Random(seed)
    rows = []
    for number, length in enumerate(lengths):
        ids = [choose.randrange(VOCAB) for _ in range(length)]
        masked, words = (1.0 if number == 4 else 0.3), (3 if number == 2 else 1)  # a row without loss, one of others
        labels = [-100 if choose.random() < masked else words * each % VOCAB for each in ids]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


ROWS = [row for seed, lengths in enumerate(STEP_LENGTHS) for row in make_rows(lengths, seed)]
EVAL_ROWS = make_rows(EVAL_LENGTHS, 9)
STEPS = ((*range(12),), (*range(12, 24),))


def importance_of(row):
    """A weight of each token, for a loss that a user writes."""
    return torch.tensor([0.25 + each % 7 for each in row["input_ids"]], dtype=torch.float64)


def make_models(folder):
    """Write each of MODELS, weights in fp32; return their folders, and that of adapters for the last."""
    for name, changes in MODELS.items():
        write_model(folder / name, num_hidden_layers=4, **changes)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = AutoModelForCausalLM.from_pretrained(folder / "adapters", dtype=torch.float32)
    torch.manual_seed(7)
    get_peft_model(model, config).save_pretrained(folder / "adapter")
    return folder


def load_model(folder, name):
    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64, attn_implementation="sdpa")
    if name == "adapters":
        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True, autocast_adapter_dtype=False)
    for each in model.parameters():
        each.data = each.data.double()
    return model.train()


def make_optimizer(model):
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.dim() >= 2], "weight_decay": DECAY},
        {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)


def load_saved(folder):
    """Return the tensors of a model, or of adapters, in a folder."""
    (file,) = Path(folder).glob("*.safetensors")
    return load_file(file)


@dataclass
class Outcome:
    """Of each step (loss, norm before clipping, loss of EVAL_ROWS after, share of tokens in rings); what is saved."""

    steps: list[tuple[float, float, float, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


# Losses: functions of logits (tokens, words) and labels (tokens,), which users write much as they stand here.


def label_losses(logits, labels):
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")


def with_z(logits, labels):
    squares = logits.logsumexp(-1).square() * (labels != -100)
    return (label_losses(logits, labels) + 1e-2 * squares).sum()


def weighed(logits, labels, importance):
    return (label_losses(logits, labels) * importance).sum() + with_z(logits, labels)


def share_with_z(logits, labels, divisor):
    """A microbatch's share, of logits (1, tokens, words) and labels that are not shifted, as Hugging Face has them."""
    return with_z(logits[0, :-1], labels[0, 1:]) / divisor


def preference(sums):
    """A loss of the log-probabilities of whole sequences, two by two."""
    return torch.stack([-F.logsigmoid(0.1 * (a - b)) for a, b in zip(sums[::2], sums[1::2], strict=True)]).mean()


def spread(values):
    """A loss of the log-probabilities of all tokens, sequence by sequence, which is no sum over them."""
    return torch.stack([each.square().mean() for each in values]).mean().sqrt()


COMBINED = {"by sequence": ("sequence", preference), "by token": ("token", spread)}


def combined(values, loss):
    """Make such a loss from the values of all tokens, (length,) a sequence."""
    per, combine = COMBINED[loss]
    return combine([each.sum() if per == "sequence" else each for each in values])


def count_labels(rows):
    return sum(label != -100 for row in rows for label in row["labels"][1:])


def run_rows(model, rows):
    """Yield the logits and labels of all tokens of a row but the last, and its importance, row by row."""
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1]
        yield logits, torch.tensor(row["labels"][1:], dtype=torch.int64), importance_of(row)[:-1]


def sum_of(one):
    """Make a mean over a batch's labels of what `one` sums over a row."""
    return lambda model, rows: sum(one(*each) for each in run_rows(model, rows)) / count_labels(rows)


def of_values(loss, model, rows):
    """Return a loss of values, 0 for the last token of each row."""
    values = [F.pad(-label_losses(logits, labels), (0, 1)) for logits, labels, _ in run_rows(model, rows)]
    return combined(values, loss)


LOSSES = {
    "next token": sum_of(lambda logits, labels, _: label_losses(logits, labels).sum()),
    "token loss": sum_of(weighed),
    "compute_loss": sum_of(lambda logits, labels, _: with_z(logits, labels)),
    **{loss: partial(of_values, loss) for loss in COMBINED},
}


@cache
def reference(folder, name, loss, steps=STEPS):
    """Return the outcome of a plain training whose steps take these of ROWS."""
    model, loss_of, found = load_model(folder, name), LOSSES[loss], Outcome()
    optimizer = make_optimizer(model)
    for numbers in steps:
        optimizer.zero_grad()
        total = loss_of(model, [ROWS[number] for number in numbers])
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item()
        optimizer.step()
        with torch.no_grad():
            found.steps.append((total.item(), norm, loss_of(model, EVAL_ROWS).item(), 0.0))
    saved = folder / "-".join(["plain", name, loss, *map(str, steps[0])])
    model.save_pretrained(saved)
    found.weights = load_saved(saved)
    return found
