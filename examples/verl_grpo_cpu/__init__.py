"""GRPO by veRL's own trainer on a machine without an accelerator, with zerodrift as the rollout."""
