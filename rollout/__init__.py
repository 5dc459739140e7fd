"""The rollout service of zerodrift."""
