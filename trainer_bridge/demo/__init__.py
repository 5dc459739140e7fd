"""``zerodrift demo``: a small GRPO run over the real service, compared by bits at every step."""
