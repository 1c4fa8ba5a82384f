"""Which verifier a task asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from worldfork.core.clock import Clock
from worldfork.core.errors import ConfigError
from worldfork.records.task import Task
from worldfork.reward.assertions import FilesSpec
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.command_verifier import CommandVerifier
from worldfork.reward.files_verifier import FilesVerifier
from worldfork.reward.final_verifier import FinalVerifier, final_spec
from worldfork.reward.judge_program import JudgeSpec
from worldfork.reward.pytest_verifier import PytestVerifier
from worldfork.reward.score_verifier import Part, ScoreFunction, ScoreVerifier, WeightedVerifier, named_function
from worldfork.reward.split.automatic import AutomaticVerifier
from worldfork.reward.split.proof import ProofStore
from worldfork.reward.split.verifier import SplitVerifier
from worldfork.reward.verifier import Verifier

KINDS = ("auto", "pytest", "split", "command", "files", "final", "score", "weighted")


def verifier_for(
    wanted: Task | Mapping[str, Any],
    calibrations: CalibrationStore,
    *,
    score: ScoreFunction | None = None,
    clock: Clock | None = None,
) -> Verifier:
    """Return the verifier that a task, or a specification such as `{"kind": "pytest"}`, asks for.

    Args:
        wanted: the task, or what stands in its `verifier`.
        calibrations: where expected ids are kept.
        score: a callable that grades in the place of whatever the task asks for.
        clock: for times.

    Raises:
        ConfigError: an unknown kind, or a specification that is malformed.
    """
    if score is not None:
        return ScoreVerifier(score, clock=clock)
    spec = wanted.verifier if isinstance(wanted, Task) else wanted
    if not isinstance(spec, Mapping):
        raise ConfigError("verifier is not an object", field="verifier")
    kind = spec.get("kind") or "auto"
    make = _MAKERS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise ConfigError(f"verifier {kind!r} is none of {', '.join(KINDS)}", field="verifier.kind")
    known = {"kind", *_FIELDS.get(kind, ())}
    unknown = sorted(set(map(str, spec)) - known)
    if unknown:
        raise ConfigError(f"verifier {kind} has no field {unknown[0]!r}", field=f"verifier.{unknown[0]}")
    return make(spec, calibrations, clock)


def _auto(spec: Mapping[str, Any], calibrations: CalibrationStore, clock: Clock | None) -> Verifier:
    return AutomaticVerifier(PytestVerifier(calibrations, clock), _split(spec, calibrations, clock))


def _pytest(_: Mapping[str, Any], calibrations: CalibrationStore, clock: Clock | None) -> Verifier:
    return PytestVerifier(calibrations, clock)


def _split(_: Mapping[str, Any], calibrations: CalibrationStore, clock: Clock | None) -> SplitVerifier:
    proofs = ProofStore(calibrations.directory / "split")
    return SplitVerifier(PytestVerifier(calibrations, clock), proofs, clock)


def _judge(spec: Mapping[str, Any]) -> JudgeSpec:
    answer = spec.get("answer", "exit")
    if not isinstance(answer, str):
        raise ConfigError("answer is no text", field="verifier.answer")
    return JudgeSpec(spec.get("command", ()), answer)


def _command(spec: Mapping[str, Any], _: CalibrationStore, clock: Clock | None) -> Verifier:
    return CommandVerifier(_judge(spec), clock)


def _files(spec: Mapping[str, Any], _: CalibrationStore, clock: Clock | None) -> Verifier:
    return FilesVerifier(FilesSpec.from_json(spec.get("checks", ())), clock)


def _final(spec: Mapping[str, Any], calibrations: CalibrationStore, clock: Clock | None) -> Verifier:
    return FinalVerifier(final_spec(spec, _judge(spec) if "command" in spec else None), calibrations, clock)


def _score(spec: Mapping[str, Any], _: CalibrationStore, clock: Clock | None) -> Verifier:
    function = spec.get("function")
    if not isinstance(function, str) or ":" not in function:
        raise ConfigError("a score verifier needs a function, MODULE:NAME", field="verifier.function")
    return ScoreVerifier(
        named_function(function), name=function, needs_end=spec.get("needs_end", False) is True, clock=clock
    )


def _weighted(spec: Mapping[str, Any], calibrations: CalibrationStore, clock: Clock | None) -> Verifier:
    given = spec.get("parts")
    if not isinstance(given, Mapping):
        raise ConfigError("parts is not an object of name -> {weight, verifier}", field="verifier.parts")
    parts = {}
    for name, part in given.items():
        if not isinstance(part, Mapping) or set(part) - {"weight", "verifier"} or "verifier" not in part:
            raise ConfigError(f"part {name!r} is not {{weight, verifier}}", field="verifier.parts")
        parts[str(name)] = Part(verifier_for(part["verifier"], calibrations, clock=clock), part.get("weight", 1.0))
    return WeightedVerifier(parts, combine=spec.get("combine", "mean"))


_Maker = Callable[[Mapping[str, Any], CalibrationStore, Clock | None], Verifier]

_MAKERS: dict[str, _Maker] = {
    "auto": _auto,
    "pytest": _pytest,
    "split": _split,
    "command": _command,
    "files": _files,
    "final": _final,
    "score": _score,
    "weighted": _weighted,
}

_FIELDS = {
    "command": ("command", "answer"),
    "files": ("checks",),
    "final": ("services", "ready", "ready_wall_s", "command", "answer"),
    "score": ("function", "needs_end"),
    "weighted": ("parts", "combine"),
}
