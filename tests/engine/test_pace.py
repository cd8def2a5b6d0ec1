"""The pace of prompts: exact on small backlogs."""

from engine.pace import MIN_ROWS, prefill_tokens_per_step


def test_short_outputs_prompts_are_spread_over_the_steps_of_the_long_ones() -> None:
    # 9,000 tokens may take the 90 steps until the last of them must start.
    assert prefill_tokens_per_step({10: 9000}, num_steps=100, num_decodes=300) == 100


def test_the_tightest_appointment_decides() -> None:
    # The 50-step outputs must be in within 50 steps: 6,000 tokens; all 7,000 within 90.
    assert prefill_tokens_per_step({50: 6000, 10: 1000}, num_steps=100, num_decodes=300) == 120


def test_an_output_as_long_as_the_longest_running_is_not_made_to_wait() -> None:
    assert prefill_tokens_per_step({100: 1, 10: 1000}, num_steps=100, num_decodes=300) is None
    assert prefill_tokens_per_step({10: 1000}, num_steps=0, num_decodes=0) is None


def test_a_step_of_few_rows_is_filled_up() -> None:
    assert prefill_tokens_per_step({10: 90}, num_steps=100, num_decodes=6) == MIN_ROWS - 6


def test_nothing_waiting_asks_for_nothing() -> None:
    assert prefill_tokens_per_step({}, num_steps=100, num_decodes=MIN_ROWS) == 0
