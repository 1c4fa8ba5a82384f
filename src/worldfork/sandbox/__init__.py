"""Floor 2: live sandboxes and the drivers that start them. Layers in and out, no digests."""
