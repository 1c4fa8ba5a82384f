"""Floor 1: frozen dataclasses that every other floor speaks in. Imports nothing but core."""
