"""Is a fork right? Numbered checks that any system which snapshots and forks sandboxes can be put through."""
