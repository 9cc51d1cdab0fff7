"""`own_loop_plain.py`, planned: `torchrun --nproc-per-node 8 own_loop.py`."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, get_scheduler

import lengthwise

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
session = lengthwise.Session(model, optimizer)
for step in range(4):
    loss = session.backward(rows).loss
    norm = session.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if session.rank == 0:
        print(f"step {step + 1}: loss {loss:.5f}, norm {norm:.4f}", flush=True)
session.close()
