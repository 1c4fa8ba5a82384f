"""Floor 5: tasks, policies, one rollout, a group of them, and the journal that they are written to."""
