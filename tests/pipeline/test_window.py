"""The window in front of the engine: what goes next, and the books of what the engine has."""

from pipeline.prompts import PromptBuilder, compile_tasks
from pipeline.rows import Work
from pipeline.suspects import Loss
from pipeline.window import FIRST_REQUEST_ID, EngineWindow
from tests.pipeline.parts import ByteTokenizer, engine_info, make_document

PROMPT = "0123456789"  # 10 tokens


def make_window(max_running: int = 2, max_tokens_per_step: int = 15, num_documents: int = 0) -> EngineWindow:
    window = EngineWindow(max_running=max_running, max_tokens_per_step=max_tokens_per_step, urgent_after_seconds=300.0)
    prompts = PromptBuilder(compile_tasks({}, ByteTokenizer()), ByteTokenizer(), engine_info())
    for offset in range(num_documents):
        window.wait(Work(prompts.prepare(make_document(offset, prompt=PROMPT)), arrived=0.0), now=0.0)
    return window


def offsets(works: list[Work]) -> list[int]:
    return [work.prepared.document.position.offset for work in works]


def test_two_steps_of_tokens_go_to_the_engine_and_the_rest_waits() -> None:
    window = make_window(num_documents=5)
    first = window.next_batch(hit_rate=0.0, now=0.0)
    assert offsets(first) == [0, 1, 2]  # 30 tokens
    requests = window.start(first, now=1.0)
    assert [request.request_id for request in requests] == [
        FIRST_REQUEST_ID,
        FIRST_REQUEST_ID + 1,
        FIRST_REQUEST_ID + 2,
    ]
    assert (window.num_waiting, window.num_running, window.waiting_tokens) == (2, 3, 20)


def test_what_can_run_is_not_counted_against_the_two_steps() -> None:
    window = make_window(num_documents=7)
    window.start(window.next_batch(0.0, 0.0), now=0.0)
    # Three are there, two of them run: 10 tokens of the 30 are spent.
    assert offsets(window.next_batch(0.0, 0.0)) == [3, 4]


def test_cached_tokens_make_room_for_more() -> None:
    assert len(make_window(num_documents=9).next_batch(hit_rate=0.5, now=0.0)) == 6


def test_an_output_of_what_was_dropped_has_no_work() -> None:
    window = make_window(num_documents=4)
    window.start(window.next_batch(0.0, 0.0), now=0.0)
    works, request_ids = window.drop_where(lambda work: work.prepared.document.position.offset in (1, 3))
    assert (sorted(offsets(works)), request_ids) == ([1, 3], [2])
    assert window.end(2) is None
    assert (window.num_running, window.num_waiting) == (2, 0)


def test_what_a_lost_engine_had_waits_in_halves_and_nothing_else_is_given_meanwhile() -> None:
    window = make_window(num_documents=4)
    window.start(window.next_batch(0.0, 0.0), now=0.0)
    assert (window.num_running, window.is_searching) == (3, False)
    assert window.lost() == (Loss(), None)
    assert (window.num_running, window.num_waiting, window.is_searching) == (0, 4, True)
    assert [request.request_id for request in window.next_suspects(now=1.0)] == [1, 2]
    assert window.next_suspects(now=1.0) == []
    assert (window.num_running, window.num_waiting) == (2, 2)
    assert offsets(window.drop_waiting()) == [3, 2]
    assert offsets(window.drop_running()) == [0, 1]
    assert (window.num_running, window.num_waiting, window.is_searching) == (0, 0, False)
