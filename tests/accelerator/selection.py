"""Which of the tests that start ranks run with emulated devices too, and why the others do not."""

from __future__ import annotations

from pathlib import Path

FILES = """
    omni_tuner joining inside tensor_parallel steps groups cluster_methods checkpoints deaths regroup parity finetuning
    merged proportional
"""
"""Files, without `test_` and `.py`, all of whose tests do, or most."""

TESTS = {
    "device_tuner": "test_all_ranks_decide_alike_and_end_alike test_ddp_and_one_group_train_as_without_the_callback",
    "frozen": """
        test_no_frozen_weight_moves_in_a_real_run
        test_a_layer_that_is_frozen_in_mid_run_becomes_what_is_evaluated_and_moves_no_more
    """,
    "half_precision": "test_ranks_of_a_group_have_one_loss_scale_whatever_groups_they_were_in",
    "histories": "test_fits_of_one_script_need_no_equal_histories_of_their_ranks",
    "lossy": """
        test_real_ranks_train_alike_and_their_record_replays_bitwise test_with_one_group_a_format_is_without_effect
    """,
    "overlap": "test_real_ranks_overlap_their_exchanges_and_their_record_replays_bitwise",
    "servers": "test_real_servers_hold_bitwise_what_one_would_and_a_dead_one_is_named",
    "transport": "test_real_processes_train_over_a_transport_that_the_package_does_not_know",
    "validation": """
        test_all_ranks_hear_of_the_same_validations_with_the_same_steps
        test_each_checkpoint_has_the_weights_whose_metric_it_was_saved_for
        test_the_group_that_evaluates_reads_all_data_gathers_in_it_and_stops_the_run
    """,
    "wire_format": """
        test_through_a_real_server_and_other_groups_nothing_given_is_lost_or_sent_twice
        test_a_leader_hands_on_what_it_is_answered_in_as_few_bytes_as_it_came
    """,
}
"""By file, the tests that do; the others of these files compute in one process, or in the simulator."""

NO_DEVICE = "the processes that it starts compute nothing on a device"
ALIKE = "ranks do with devices what they do in the files that are selected, and it takes too long"
FILES_LEFT_OUT = {
    "all_reduce": "one script trains all its cases, one of them with sparse gradients, and the device has none",
    "doctor": NO_DEVICE,
    "ends": NO_DEVICE,
    "faces": ALIKE,
    "first_batches": ALIKE,
    "hostile": NO_DEVICE,
    "manners": ALIKE,
    "periods": "what is said before the first batch is known before there is anything on a device",
    "placement": ALIKE,
    "progress": NO_DEVICE,
    "refusals": NO_DEVICE,
    "serve": NO_DEVICE,
    "server_restart": "it is the server that is killed, which has no device",
    "shared_memory": NO_DEVICE,
    "signals": ALIKE,
    "start_methods": "ranks that are forked or spawned by other launchers do not load the devices",
    "three_hosts": "its network namespaces need root, and its ranks do what those of `joining` do",
    "tuned_servers": ALIKE,
    "validated": "the script evaluates weights of two ranks on the CPU",
    "watch": NO_DEVICE,
}
"""Files that do not, with the reason."""

BY_COUNT = "that a member waits is seen by the number of its collectives, which the emulated backend does not count"
BY_TIME = "what the tuner chooses depends on times, which are the CPU's"
TESTS_LEFT_OUT = {
    f"test_omni_tuner.py::{test}": BY_TIME
    for test in (
        "test_a_second_fit_is_tuned_for_itself",
        "test_groups_that_take_too_long_to_form_are_left_alone_and_it_says_why",
        "test_a_tuned_run_goes_on_without_a_worker_that_is_lost",
        "test_a_run_whose_server_does_not_start_trains_on_in_one_group_and_says_why",
    )
} | {"test_deaths.py::test_a_shorter_stream_on_one_member_ends_its_group_with_the_reason": BY_COUNT}
"""Tests of `FILES` that do not, as pytest names them, with the reason; a function stands for all its parameters."""


def selected() -> list[str]:
    """Return the files and tests to run, as pytest names them."""
    names = [path_of(name) for name in FILES.split()]
    return names + [f"{path_of(file)}::{test}" for file, tests in TESTS.items() for test in tests.split()]


def path_of(name: str) -> str:
    """Return the path of a test file below `tests/`."""
    tests = Path(__file__).parents[1]
    [path] = tests.rglob(f"test_{name}.py")
    return path.relative_to(tests).as_posix()
