"""Makes a tiny random Qwen2 with its own tokenizer, and chat rows to train it on. Runs in the trainer environment.

python -m local.tiny_model FOLDER   # FOLDER/model, FOLDER/sums.jsonl, FOLDER/sums-eval.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

ROWS = 400
EVAL_ROWS = 16


def make_rows(count: int, seed: int) -> list[dict[str, object]]:
    """Chat rows that ask for sums."""
    draw = random.Random(seed)  # noqa: S311 - data, not secrets
    rows: list[dict[str, object]] = []
    for _ in range(count):
        a, b = draw.randint(0, 99), draw.randint(0, 99)
        question = {"role": "user", "content": f"what is {a} plus {b}?"}
        rows.append({"messages": [question, {"role": "assistant", "content": f"{a} plus {b} is {a + b}."}]})
    return rows


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_model(folder: Path, rows: list[dict[str, object]]) -> int:
    """A Qwen2 of two layers with a byte-level BPE tokenizer trained on ``rows``; returns its number of parameters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed

    set_seed(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special
    )
    tokenizer.train_from_iterator((json.dumps(row) for row in rows), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")  # noqa: S106
    fast.save_pretrained(folder)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(fast),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
        )
    )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main(folder: Path) -> None:
    """Writes everything unless it is there; the last file to appear is the evaluation set."""
    if (folder / "sums-eval.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    rows = make_rows(ROWS, seed=0)
    count = make_model(folder / "model", rows)
    write_rows(folder / "sums.jsonl", rows)
    write_rows(folder / "sums-eval.jsonl", make_rows(EVAL_ROWS, seed=1))
    print(f"made a model of {count:,} parameters and {ROWS} rows in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
