from __future__ import annotations

import json

from worldfork.records.sandbox import Base, SandboxFacts


def test_facts_of_a_newer_version_tell_what_is_to_be_cleared_away() -> None:
    facts = SandboxFacts("sb-a", "a", "/run", "user", "namespace", Base("host"), None, ("ly-a",), cgroups=("/group",))
    assert SandboxFacts.from_json(facts.to_json()) == facts
    assert SandboxFacts.from_json(json.dumps({**json.loads(facts.to_json()), "later": 1})) == facts
