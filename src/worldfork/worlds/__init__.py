"""How a world is made, once."""
