"""A plain training loop, one sequence at a time: `own_loop.py` is compared with it."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, get_scheduler

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
)
model = AutoModelForCausalLM.from_config(config)
lengths = [900, 300, *[40] * 20]
rows = [{"input_ids": torch.randint(256, (length,))} for length in lengths]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_scheduler("cosine", optimizer, 1, 5)  # a step of warm-up, 5 in all
for step in range(4):
    loss, tokens = 0.0, sum(len(row["input_ids"]) - 1 for row in rows)
    for row in rows:
        ids = row["input_ids"][None]
        part = model(input_ids=ids, labels=ids, num_items_in_batch=tokens).loss
        part.backward()
        loss += part.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss:.5f}, norm {norm:.4f}", flush=True)
