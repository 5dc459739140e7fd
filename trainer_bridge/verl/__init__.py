"""veRL as the trainer: rollout plugin, aligned FSDP actor, weight sync. Only the modules here import verl."""
