"""Prompts and rewards of the demo, from reasoning-gym: word problems, and sums that a small model can learn on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
from transformers import AutoTokenizer

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt of a step."""

    name: str
    """data set and index, e.g. "gsm_symbolic/3" """
    prompt_ids: tuple[int, ...]
    """[P] chat template applied"""
    entry: dict[str, Any]
    """reasoning-gym's item, for scoring"""


class Task:
    """Alternates gsm_symbolic word problems with one-digit sums; everything follows from the seed."""

    def __init__(self, model_path: Path, seed: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        sums = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        self._sets = {
            "gsm_symbolic": reasoning_gym.create_dataset("gsm_symbolic", size=500, seed=seed),
            "chain_sum": reasoning_gym.create_dataset("chain_sum", size=500, seed=seed, **sums),
        }

    def problems(self, step: int, count: int) -> list[Problem]:
        """The prompts of a step."""
        names = list(self._sets)
        return [self._problem(names[i % 2], step * count + i) for i in range(count)]

    def _problem(self, name: str, index: int) -> Problem:
        data = self._sets[name]
        entry = data[index % len(data)]
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": entry["question"]}], add_generation_prompt=True, tokenize=False
        )
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return Problem(f"{name}/{index}", tuple(ids), entry)

    def reward(self, problem: Problem, text: str) -> float:
        """1 when the last number of the answer is right, else 0."""
        numbers = _NUMBER.findall(text)
        answer = numbers[-1].replace(",", "") if numbers else ""
        data = self._sets[problem.name.split("/")[0]]
        return float(data.score_answer(answer=answer, entry=problem.entry) == 1.0)
