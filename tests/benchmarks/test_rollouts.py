from pathlib import Path

import pytest
import torch
import transformers

pytest.importorskip("trl")  # an extra

import rollouts


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_both_kinds_train_the_same(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    config = transformers.LlamaConfig(
        vocab_size=rollouts.VOCAB, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=1
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    sizes = rollouts.Sizes(completions=16, longest=64, steps=2, layers=1, hidden=32, at_once=8)
    found = list(rollouts.rows(sizes, tmp_path))
    assert [row[0] for row in found] == list(rollouts.CASES)
    assert all(float(seconds) > 0 for row in found for seconds in row[1:3])


@pytest.mark.exhaustive
def test_shared_prompts_train_the_same() -> None:
    sizes = rollouts.Sizes(completions=16, longest=64, steps=1, layers=1, hidden=32, at_once=8)
    assert [row[0] for row in rollouts.shared_rows(sizes)] == list(rollouts.SHARED)
