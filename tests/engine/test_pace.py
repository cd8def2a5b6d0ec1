"""The pace of prompts: exact on small backlogs."""

from collections import Counter

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


def pace_of_a_known_end(beyond: dict[int, int] | None = None) -> BacklogPace:
    pace = BacklogPace()
    pace.expect(beyond or {})
    return pace


def test_prompts_come_in_chunks_that_keep_the_pace() -> None:
    pace = pace_of_a_known_end()
    left = Counter({10: 45_000})
    chunks: list[int] = []
    for step in range(90):
        chunk = pace.next_chunk(left, [(1, 100 - step)], num_decodes=24, room=8000)
        left[10] -= min(chunk, left[10])
        chunks.append(chunk)
    assert chunks[:4] == [1000, 0, 1000, 0]  # 500 a step
    assert set(chunks) == {0, CHUNK_TOKENS - 24}
    assert sum(chunks) >= 45_000


def test_a_pace_beyond_a_chunk_is_kept() -> None:
    assert pace_of_a_known_end().next_chunk(Counter({10: 90_000}), [(1, 20)], num_decodes=1, room=20_000) == 9000


def test_what_is_yet_to_come_and_what_is_left_of_running_prompts_count_as_what_waits() -> None:
    waiting, beyond = Counter({10: 30_000}), {10: 45_000}
    running = [(1, 20), (0, 19), (10_000, 10), (5_000, 10)]
    assert pace_of_a_known_end(beyond).next_chunk(waiting, running, num_decodes=2, room=20_000) == 9000
    assert (waiting, beyond) == ({10: 30_000}, {10: 45_000})


def test_a_longer_output_yet_to_come_than_any_that_runs_lifts_the_pace() -> None:
    pace = pace_of_a_known_end({100: 1})
    assert pace.next_chunk(Counter({10: 90_000}), [(1, 20)], num_decodes=1, room=20_000) == 20_000
    assert pace_of_a_known_end().next_chunk(Counter({10: 90_000}), [], num_decodes=0, room=20_000) == 20_000


def test_as_long_as_more_may_come_there_is_no_pace_and_afterwards_no_debt() -> None:
    pace = BacklogPace()
    kept, chunks = [pace.is_kept], []
    for is_known in (True, True, False, True):
        pace.expect({} if is_known else None)
        kept.append(pace.is_kept)
        if is_known:
            chunks.append(pace.next_chunk(Counter({10: 10}), [(1, 20)], num_decodes=24, room=8000))
    assert kept == [False, True, True, False, True]
    assert chunks == [CHUNK_TOKENS - 24, 0, CHUNK_TOKENS - 24]  # the second step was 999 ahead
