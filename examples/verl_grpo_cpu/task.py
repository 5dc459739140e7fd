"""A task small enough for a random two-layer model: produce words with even numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas
from tokenizers import Tokenizer, models, pre_tokenizers

from rollout.assets import tiny_model

WORDS = ("<pad>", "<eos>", "<user>", "<assistant>", "\n", *(f"w{i}" for i in range(5, 60)))
TEMPLATE = (
    "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def write_model(folder: Path) -> Path:
    """A random Llama with a word tokenizer and a chat template."""
    tiny_model("llama", folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w5"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "w5",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def write_prompts(file: Path, count: int = 16) -> Path:
    """Prompts in the columns of verl's data set."""
    rows = [
        {
            "data_source": "zerodrift/even",
            "prompt": [{"role": "user", "content": f"w{10 + i} w{30 + i}"}],
            "ability": "even",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i in range(count)
    ]
    pandas.DataFrame(rows).to_parquet(file)
    return file


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """verl's reward function: the share of words with an even number."""
    words = [word for word in solution_str.split() if word.startswith("w")]
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))
