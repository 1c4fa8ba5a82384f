"""Checkpoint, restore, fork, identity: where the store and live sandboxes meet."""
