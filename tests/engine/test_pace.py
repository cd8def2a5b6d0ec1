"""The pace of prompts: exact on small backlogs."""

from engine.pace import CHUNK_TOKENS, BacklogPace, prefill_tokens_per_step


def test_short_outputs_prompts_are_spread_over_the_steps_of_the_long_ones() -> None:
    # 9,000 tokens may take the 90 steps until the last of them must start.
    assert prefill_tokens_per_step({10: 9000}, num_steps=100) == 100


def test_the_tightest_appointment_decides() -> None:
    # The 50-step outputs must be in within 50 steps: 6,000 tokens; all 7,000 within 90.
    assert prefill_tokens_per_step({50: 6000, 10: 1000}, num_steps=100) == 120


def test_an_output_as_long_as_the_longest_running_is_not_made_to_wait() -> None:
    assert prefill_tokens_per_step({100: 1, 10: 1000}, num_steps=100) is None
    assert prefill_tokens_per_step({10: 1000}, num_steps=0) is None


def test_nothing_waiting_asks_for_nothing() -> None:
    assert prefill_tokens_per_step({}, num_steps=100) == 0


def test_prompts_come_in_chunks_that_keep_the_pace() -> None:
    pace = BacklogPace()
    pace.waits(45_000, 10)
    chunks: list[int] = []
    for step in range(90):
        chunk = pace.next_chunk({}, num_steps=100 - step, num_decodes=24)
        assert chunk is not None
        pace.leaves(min(chunk, 45_000 - sum(chunks)), 10)
        chunks.append(chunk)
    assert chunks[:4] == [1000, 0, 1000, 0]  # 500 a step
    assert set(chunks) == {0, CHUNK_TOKENS - 24}
    assert sum(chunks) >= 45_000


def test_a_pace_beyond_a_chunk_is_kept() -> None:
    pace = BacklogPace()
    pace.waits(90_000, 10)
    assert pace.next_chunk({}, num_steps=20, num_decodes=0) == 9000
