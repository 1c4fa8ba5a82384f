"""The `worldfork` command: one verb per thing a person does, thin over the public names of the library.

typer and rich are imported in this room and nowhere else.
"""
