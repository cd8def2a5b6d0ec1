"""The window in front of the engine: what goes next, and the books of what the engine has."""

from pipeline.prompts import PromptBuilder, compile_tasks
from pipeline.rows import Work
from pipeline.suspects import Loss
from pipeline.window import FIRST_REQUEST_ID, EngineWindow
from schemas.inference import EngineStats, SamplingParams
from tests.pipeline.parts import ByteTokenizer, engine_info, make_document

PROMPT = "0123456789"  # 10 tokens


def make_window(max_running: int = 2, max_tokens_per_step: int = 12, num_documents: int = 0) -> EngineWindow:
    window = EngineWindow(max_running=max_running, max_tokens_per_step=max_tokens_per_step, urgent_after_seconds=300.0)
    prompts = PromptBuilder(compile_tasks({}, ByteTokenizer()), ByteTokenizer(), engine_info())
    for offset in range(num_documents):
        window.wait(Work(prompts.prepare(make_document(offset, prompt=PROMPT)), arrived=0.0), now=0.0)
    return window


def offsets(works: list[Work]) -> list[int]:
    return [work.prepared.document.position.offset for work in works]


def test_three_steps_of_tokens_go_to_the_engine_and_the_rest_waits() -> None:
    window = make_window(num_documents=7)
    first = window.next_batch(EngineStats(), now=0.0)
    assert offsets(first) == [0, 1, 2]  # 30 tokens of 36
    requests = window.start(first, now=1.0)
    assert [request.request_id for request in requests] == [FIRST_REQUEST_ID + i for i in range(3)]
    assert (window.num_waiting, window.num_running, window.waiting_tokens) == (4, 3, 40)
    assert len(window.next_batch(EngineStats(), now=1.0)) == 1  # 6 tokens of room, and the first always fits


def test_what_has_begun_makes_room() -> None:
    window = make_window(num_documents=7)
    window.start(window.next_batch(EngineStats(), 0.0), now=0.0)
    assert offsets(window.next_batch(EngineStats(num_begun_tokens=20), 0.0)) == [3, 4]


def test_another_engine_has_been_given_nothing() -> None:
    window = make_window(num_documents=12)
    window.start(window.next_batch(EngineStats(), 0.0), now=0.0)
    window.lost()
    window.drop_running()
    assert offsets(window.next_batch(EngineStats(), 0.0)) == [3, 4, 5]


def test_once_all_is_known_the_engine_is_told_what_it_is_yet_to_get() -> None:
    window = make_window(num_documents=7)
    outputs = SamplingParams().max_tokens
    beyond = []
    for begun, knows_all in ((0, False), (30, True), (60, True), (60, True), (60, False)):
        works = window.next_batch(EngineStats(num_begun_tokens=begun), 0.0, knows_all)
        window.start(works, now=0.0)
        beyond.append((offsets(works), None if window.beyond is None else dict(window.beyond)))
    assert beyond == [
        ([0, 1, 2], None),
        ([3, 4, 5], {outputs: 10}),
        ([6], {}),
        ([], {}),
        ([], None),
    ]


def test_an_output_of_what_was_dropped_has_no_work() -> None:
    window = make_window(num_documents=4)
    window.start(window.next_batch(EngineStats(), 0.0), now=0.0)
    works, request_ids = window.drop_where(lambda work: work.prepared.document.position.offset in (1, 3))
    assert (sorted(offsets(works)), request_ids) == ([1, 3], [2])
    assert window.end(2) is None
    assert (window.num_running, window.num_waiting) == (2, 0)


def test_what_a_lost_engine_had_waits_in_halves_and_nothing_else_is_given_meanwhile() -> None:
    window = make_window(num_documents=4)
    window.start(window.next_batch(EngineStats(), 0.0), now=0.0)
    assert (window.num_running, window.is_searching) == (3, False)
    assert window.lost() == (Loss(), None)
    assert (window.num_running, window.num_waiting, window.is_searching) == (0, 4, True)
    assert [request.request_id for request in window.next_suspects(now=1.0)] == [1, 2]
    assert window.next_suspects(now=1.0) == []
    assert (window.num_running, window.num_waiting) == (2, 2)
    assert offsets(window.drop_waiting()) == [3, 2]
    assert offsets(window.drop_running()) == [0, 1]
    assert (window.num_running, window.num_waiting, window.is_searching) == (0, 0, False)
