from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from worldfork.core.settings import load_settings
from worldfork.sandbox import namespace
from worldfork.sandbox.cgroups import CgroupLayout
from worldfork.sandbox.namespace import NamespaceDriver


def test_the_warning_of_a_host_without_cgroups_points_at_no_line_of_the_standard_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLDFORK_CGROUPS", "auto")
    monkeypatch.setattr(namespace, "detect_layout", lambda: CgroupLayout({}, None))
    with ThreadPoolExecutor(1) as threads, pytest.warns(RuntimeWarning, match="no cgroup of this host") as caught:
        threads.submit(NamespaceDriver, load_settings()).result()
    assert [each.filename for each in caught] == ["worldfork"]
