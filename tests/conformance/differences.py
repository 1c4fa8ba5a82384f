"""What drivers cannot all do, and which tests are about just that. The table of docs/behaviour.md says the same.

A driver says in its capabilities what it can do on this host. What is not named here holds for every driver.
"""

from __future__ import annotations

from worldfork.sandbox.driver import Capabilities

TESTS_THAT_NEED = {
    "host_base": (
        "test_the_host_base_shows_the_userland_and_no_secret",
        "test_a_changed_base_is_refused_unless_allowed",
    ),
    "host_network": (
        "test_network_host_is_the_host_s",
        "test_a_fresh_sandbox_is_on_the_network_unless_told_otherwise",
        "test_network_host_is_the_hosts_as_the_documents_say",
        "test_the_flow_with_packages_from_the_registry",
    ),
    "disk_on_host": (
        "test_a_sandbox_that_fills_its_disk_is_ended",
        "test_its_own_disk_is_its_own_doing",
        "test_directories_nested_out_of_sight_do_not_hide_what_they_hold",
        "test_a_flood_of_empty_files_is_a_use_of_disk",
        "test_a_mount_in_the_way_of_a_removal_is_left_alone",
    ),
    "adopts": (
        "test_the_disk_of_a_fork_and_back",
        "test_what_the_sandbox_stands_on_may_be_deleted_and_another_process_finds_it",
        "test_what_it_was_before_outlives_a_caller_that_is_cancelled",
        "test_what_the_kernel_lets_go_of_a_moment_late_is_waited_for",
        "test_a_winner_is_promoted",
    ),
    "memory_checkpoint": (
        "test_what_runs_is_in_the_snapshot_and_its_source_goes_on",
        "test_each_fork_goes_on_by_itself_at_any_depth",
        "test_a_fork_has_its_own_identity_before_it_is_handed_out",
        "test_a_hook_runs_first_and_its_failure_is_that_child_s",
        "test_connections_that_leave_are_refused_unless_told_otherwise",
        "test_a_suspended_sandbox_comes_back_as_the_one_it_was",
        "test_what_a_memory_snapshot_cannot_do_is_refused",
    ),
    "host_processes": (
        "test_limits_that_end_processes_are_counted",
        "test_what_is_gone_and_was_never_waited_for_has_used_its_cpu",
        "test_threads_that_want_a_cpu_are_told_from_those_that_sleep",
        "test_no_way_of_forking_leaves_the_limits_of_the_sandbox",
    ),
}
"""By capability: the tests that show nothing without it. Others ask within, by `able` or the fixture `needs`."""

TESTS = {test: capability for capability, tests in TESTS_THAT_NEED.items() for test in tests}


def able(capabilities: Capabilities, name: str) -> bool:
    """Whether a driver can do what the capability `name` says."""
    return bool(getattr(capabilities, name))


def lacks(test: str, capabilities: Capabilities) -> str:
    """Return the capability that a test needs and a driver lacks; empty if there is none."""
    capability = TESTS.get(test, "")
    return "" if not capability or able(capabilities, capability) else capability
