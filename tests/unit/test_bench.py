from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench import machines, main
from bench.harness import Options, Skip

from worldfork.core.errors import DriverUnavailable


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the figures that are taken, each with two rows in place of a measurement."""
    names: list[str] = []

    def take(name: str, _: object) -> dict[str, Any]:
        names.append(name)
        rows = [
            machines.Row("ready", "ms", 66.12345, 75.0, 5.1),
            machines.Row("pause", "ms", 15.0, 15.0),
            machines.Row("QEMU", "mib", 40.5),
        ]
        return machines.row_figure(name, "a title", "tcg", {}, rows)

    monkeypatch.setattr(main, "take", take)
    monkeypatch.setattr(main, "_take_apart", take)
    return names


def test_each_driver_has_its_figures(taken: list[str]) -> None:
    main.main(["--driver", "microvm"])
    assert tuple(taken) == main.MACHINE_FIGURES
    taken.clear()
    main.main([])
    assert tuple(taken) == main.FIGURES


def test_a_figure_is_taken_by_its_name_whatever_the_driver(taken: list[str]) -> None:
    assert main.main(["machine_d", "import"]) == 1
    assert taken == ["machine_disk", "import_time"]


def test_every_figure_has_a_program() -> None:
    for name in (*main.FIGURES, *main.MACHINE_FIGURES):
        assert (Path(main.__file__).parent / f"{name}.py").is_file()


def test_the_table_has_both_columns(taken: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["machine_fork"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bar", "microvm", "namespace"] in lines
    assert ["ready", "75", "ms", "66.123", "ms", "5.1", "ms", "pass"] in lines
    assert ["pause", "15", "ms", "15", "ms", "MISSED"] in lines
    assert ["QEMU", "40.5", "MiB", "reported"] in lines


def test_only_what_has_a_bar_is_judged() -> None:
    rows = [machines.Row("failures", "n", 0.0, 0.0, strict=False), machines.Row("told", "s", 9.0)]
    result = machines.row_figure("name", "title", "kvm", {"x": 1}, rows)
    assert (result["status"], len(result["bars"]), result["rows"][1]["passed"]) == ("pass", 1, None)
    assert "kvm" in result["notes"][0]


def test_without_machines_a_figure_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Door:
        @staticmethod
        def create(**_: object) -> None:
            raise DriverUnavailable("there is no QEMU", remedy="apt-get install it")

    class Library:
        Sandbox = Door

    monkeypatch.setattr(machines, "machine_library", lambda _: Library)
    monkeypatch.setattr(machines, "guest_root", lambda _: "dir:/")
    with pytest.raises(Skip, match=r"no QEMU.*apt-get"):
        machines.start_guest(Options(home=tmp_path))


def test_a_guest_that_computes_is_not_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([0.0, 0.3, 0.6, 0.6])

    class Busy(machines.Machine):
        def cpu_s(self) -> float:
            return next(readings)

    monkeypatch.setattr(machines.time, "sleep", lambda _: None)
    machines.at_rest(Busy(1, "tcg", 0, 0))
    assert not list(readings)
