"""A tool and a parser for verl's own tool loop; a random model cannot write a call, so every first turn is one."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

ANSWER = "w40 w41 w42"
STOPS = tuple(range(5, 60, 2))
"""ids that end a turn, so that a first turn leaves room for a second"""


@function_tool
def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: the word.
    """
    return ANSWER


@ToolParser.register("zerodrift_test")
class EveryTurnCalls(ToolParser):
    """Every answer calls the tool; verl ends the conversation by its number of turns."""

    @property
    def stop_token_ids(self) -> list[int]:
        """Where a turn ends."""
        return list(STOPS)

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        """One call."""
        return self.tokenizer.decode(responses_ids), [FunctionCall(name="look_up", arguments='{"word": "w5"}')]
