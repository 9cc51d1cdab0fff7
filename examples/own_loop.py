"""The loop of `own_loop_plain.py`, planned: python own_loop.py, or torchrun --nproc-per-node 2 own_loop.py."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup

import lengthwise

torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
)
rows = [{"input_ids": torch.randint(256, (length,))} for length in [900, 300, *[40] * 20]]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=5)
session = lengthwise.Session(model, optimizer)
for step in range(4):
    loss = session.backward(rows).loss
    norm = session.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if session.rank == 0:
        print(f"step {step + 1}: loss {loss:.5f}, gradient norm {norm:.4f}", flush=True)
session.close()
