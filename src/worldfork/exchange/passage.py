"""What of a snapshot travels, and in which words: the head of an archive, and a record in a remote."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from worldfork.content.archive import LayerHead, is_digest
from worldfork.content.blocks import corrupt
from worldfork.core.errors import ConfigError, FormatUnsupported
from worldfork.core.ids import check_id
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store.layers import FORMS

FORMAT = 1
"""Of the head; a newer one is refused."""
LAYERS = "layers"
"""The kind of a base that is the lowest layer, so that it needs nothing of any machine."""
_FACTS = {"env": dict, "user": str, "working_dir": str, "limits": dict}
"""What travels of the facts: all that a restore elsewhere can use."""
_LIMITS = {"cpus", "memory_mb", "disk_mb", "pids"}
_LARGEST_LIMIT = 1 << 53
_FACTS_BYTES = 2 << 20  # as much as a program can be given at its start, variables and all
_FINGERPRINT_BYTES = 64 << 10
_END_OF_TIME_S = 253_370_764_800  # the year 9999, the last that calendars of programs have


@dataclass(frozen=True)
class Passage:
    """A snapshot on its way: its record, less what is of one machine, and its layers, the lowest first."""

    record: SnapshotRecord
    layers: Mapping[str, LayerHead]
    """By id."""

    def to_json(self) -> dict[str, Any]:
        """Return the head of an archive: plain data, the same for the same snapshot."""
        record = self.record
        return {
            "what": "snapshot",
            "format": FORMAT,
            "record": {
                "snapshot_id": record.snapshot_id,
                "parent_id": record.parent_id,
                "sandbox_id": record.sandbox_id,
                "created_s": record.created_s,
                "kind": record.kind,
                "form": record.form,
                "base": record.base,
                "layers": list(record.layers),
                "facts": travelling_facts(record.facts),
                "label": record.label,
            },
            "layers": [{"layer_id": layer_id, **head._asdict()} for layer_id, head in self.layers.items()],
        }


def passage_of(head: Mapping[str, Any]) -> Passage:
    """Read what `Passage.to_json` wrote; trusts nothing of it.

    Raises:
        Corrupt: it is no such thing.
        FormatUnsupported: a newer version wrote it.
    """
    if head.get("what") != "snapshot":
        raise corrupt("it holds no snapshot", "snapshot", head.get("what"))
    if head.get("format") != FORMAT:
        raise FormatUnsupported(
            f"the snapshot was exported with format {head.get('format')}, and this version reads {FORMAT}",
            remedy="upgrade worldfork",
            expected=FORMAT,
            actual=head.get("format"),
        )
    try:
        return _read(head["record"], head["layers"])
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise corrupt("the record of its snapshot cannot be read", "a record", f"{error!r}") from error


def _read(record: Mapping[str, Any], listed: Sequence[Mapping[str, Any]]) -> Passage:
    layers: dict[str, LayerHead] = {}
    for facts in listed:
        head = LayerHead(facts["digest"], facts["entries"], facts["logical_bytes"])
        if not is_digest(head.digest) or not all(type(number) is int and number >= 0 for number in head[1:]):
            raise ValueError(f"not the head of a layer: {facts}")
        layers[check_id("ly", facts["layer_id"])] = head
    stack = tuple(check_id("ly", layer_id) for layer_id in record["layers"])
    if not stack or len(layers) != len(listed) or sorted(stack) != sorted(layers):
        raise ValueError("the layers are not those of the record")
    created_s = record["created_s"]
    label = record["label"]
    if type(created_s) not in (int, float) or type(label) not in (str, type(None)):
        raise ValueError("a field has the wrong type")
    if not 0 <= created_s < _END_OF_TIME_S:
        raise ValueError(f"a snapshot of no year that there is: {created_s}")
    if record["kind"] != "filesystem" or record["form"] not in FORMS:
        raise ValueError(f"not a kind or a form of snapshots: {record['kind']!r}, {record['form']!r}")
    found = SnapshotRecord(
        snapshot_id=check_id("sn", record["snapshot_id"]),
        parent_id=_id_or_none("sn", record["parent_id"]),
        sandbox_id=_id_or_none("sb", record["sandbox_id"]),
        created_s=created_s,
        kind=record["kind"],
        state="ready",
        form=record["form"],
        base=_base(record["base"]),
        layers=stack,
        facts=_facts(record["facts"]),
        label=label,
    )
    found.check()
    return Passage(found, layers)


def life_of(record: SnapshotRecord) -> dict[str, object]:
    """Return what stays true of a snapshot, wherever it is: its layers are shared and merged, a base in a directory
    becomes one, and each user writes layers in the form that it can."""
    return {
        "parent_id": record.parent_id,
        "sandbox_id": record.sandbox_id,
        "created_s": record.created_s,
        "kind": record.kind,
        "label": record.label,
    }


def _id_or_none(prefix: str, text: object) -> str | None:
    return None if text is None else check_id(prefix, text)


def travelling_base(base: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a base travels: of the host's userland its fingerprint, of a directory nothing but its layer."""
    return {"kind": "host", "fingerprint": base.get("fingerprint", "")} if base["kind"] == "host" else {"kind": LAYERS}


def _base(base: Mapping[str, Any]) -> dict[str, Any]:
    """Accept no base that would show a directory of this machine inside because a stranger's record says so."""
    if base == {"kind": LAYERS}:
        return {"kind": LAYERS}
    if base.keys() == {"kind", "fingerprint"} and base["kind"] == "host" and isinstance(base["fingerprint"], str):
        if len(base["fingerprint"]) > _FINGERPRINT_BYTES:
            raise ValueError("the fingerprint of its base is too long")
        return {"kind": "host", "fingerprint": base["fingerprint"]}
    raise ValueError(f"not a base that travels: {base}")


def _facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Accept what a restore can use, and nothing else."""
    found = travelling_facts(facts)
    for name, value in found.items():
        if type(value) is not _FACTS[name]:
            raise ValueError(f"{name} is no {_FACTS[name].__name__}")
    variables = found.get("env", {})
    if not all(type(value) is str and "\0" not in name + value for name, value in variables.items()):
        raise ValueError("a variable is no text")
    if not all(name and "=" not in name for name in variables):
        raise ValueError("a variable without a name")
    numbers = found.get("limits", {})
    if not numbers.keys() <= _LIMITS:
        raise ValueError(f"no such limits: {sorted(numbers)}")
    if not all(value is None or _is_limit(value) for value in numbers.values()):
        raise ValueError("a limit is no number")
    texts = [*variables, *variables.values(), found.get("user", ""), found.get("working_dir", "")]
    if sum(len(os.fsencode(text)) for text in texts) > _FACTS_BYTES:
        raise ValueError("the facts are too long")
    return found


def _is_limit(value: object) -> bool:
    return type(value) in (int, float) and 0 < cast(float, value) < _LARGEST_LIMIT


def travelling_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of the facts travels: not which ids of the machine its files belong to, nor what nobody knows."""
    return {name: value for name, value in facts.items() if name in _FACTS}


def base_layer_id(digest: str) -> str:
    """Return the id that the tree of a base travels under: the same for the same tree."""
    return "ly-" + base64.b32encode(bytes.fromhex(digest.removeprefix("b3:"))[:10]).decode("ascii").lower()


def to_record_file(passage: Passage) -> bytes:
    """Return the file that a remote keeps of a snapshot: its head, and a digest over that."""
    head = _canonical(passage.to_json())
    return json.dumps({"digest": _digest(head), "head": passage.to_json()}, sort_keys=True, indent=1).encode() + b"\n"


def from_record_file(data: bytes) -> Passage:
    """Read what `to_record_file` returned.

    Raises:
        Corrupt, FormatUnsupported: as of `passage_of`.
    """
    try:
        read = json.loads(data)
        head, expected = read["head"], read["digest"]
        found = _digest(_canonical(head))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise corrupt("the record of a snapshot cannot be read", "a record", repr(error)) from error
    if found != expected:
        raise corrupt("the record of a snapshot has changed", expected, found)
    if not isinstance(head, dict):
        raise corrupt("the record of a snapshot cannot be read", "an object", type(head).__name__)
    return passage_of(head)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def _digest(data: bytes) -> str:
    from blake3 import blake3

    return f"b3:{blake3(data).hexdigest()}"
