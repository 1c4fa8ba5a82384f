"""What the tests' fork is told of the modules under test; there, another text stands in this one's place."""

PLAN = "{}"
