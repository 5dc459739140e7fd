"""An agent loop of two turns with a tool between them, token in, token out, on verl's own base class."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

TOOL = (50, 51, 52)
"""ids that a tool answers with"""
FIRST_TURN = 5


class TwoTurns(AgentLoopBase):
    """Sample, append the tool's ids, sample on within what is left of the response length."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """One trajectory under one request id, as verl's tool loop does it."""
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        request_id, budget = uuid4().hex, self.rollout_config.response_length
        first = await self._turn(request_id, prompt, sampling_params, FIRST_TURN)
        fed = [*prompt, *first.token_ids, *TOOL]
        left = budget - len(first.token_ids) - len(TOOL)
        second = await self._turn(request_id, fed, sampling_params, left)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[*first.token_ids, *TOOL, *second.token_ids],
            response_mask=[1] * len(first.token_ids) + [0] * len(TOOL) + [1] * len(second.token_ids),
            # verl writes 0.0 where there is no log-prob.
            response_logprobs=[*first.log_probs, *[0.0] * len(TOOL), *second.log_probs],
            num_turns=4,
            metrics=AgentLoopMetrics(),
            extra_fields=first.extra_fields | {"second": second.extra_fields["zerodrift"]},
        )

    async def _turn(self, request_id: str, ids: list[int], sampling: dict[str, Any], limit: int) -> Any:
        return await self.server_manager.generate(
            request_id=request_id, prompt_ids=ids, sampling_params=sampling | {"max_tokens": limit, "ignore_eos": True}
        )
