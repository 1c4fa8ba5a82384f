"""Floor 0: errors, ids, clock and settings. Imports nothing of this project."""
