"""Floor 2: snapshots on disk. Bytes and layers, and no sandboxes beyond the ids of those who use them."""
