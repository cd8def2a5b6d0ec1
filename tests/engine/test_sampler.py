"""The sampler against Hugging Face's logits processors, and against itself with other rows beside."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar import LabelSets
from engine.request import Request
from engine.sampler import Sampler
from engine.step_plan import SampledTokens
from schemas.inference import InferenceRequest, SamplingParams

EOS = 9


def request(
    request_id: int = 0,
    prompt: tuple[int, ...] = (1, 2),
    sampled: tuple[int, ...] = (),
    seed: int = 0,
    labels: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> Request:
    inference = InferenceRequest(
        request_id, prompt, SamplingParams(**params), seed, "classify" if labels else "generate", label_token_ids=labels
    )
    return Request(inference, [*prompt, *sampled])


def sample(logits: torch.Tensor, *requests: Request, sampler: Sampler | None = None) -> SampledTokens:
    sampler = sampler or Sampler(LabelSets({EOS}))
    for one in requests:
        sampler.add(one)
    return sampler.sample(logits, requests)


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 0.0, 0.0, 5.0]])
    sampled = sample(logits, request(0), request(1))
    assert sampled == SampledTokens([1, 0], [None, None], [True, True])


def test_no_rows_are_legal() -> None:
    assert sample(torch.empty(0, 4)) == SampledTokens()


@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_repetition_penalty_is_hugging_faces(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)) * 4
    one = request(prompt=(1, 2, 2, 30), sampled=(7, 30, 9, 9), repetition_penalty=penalty, logprobs=0)
    sampler = Sampler(LabelSets({EOS}))
    sampler.add(one)
    ours = logits.clone()
    sampler._apply_penalties(ours, [one])
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([one.token_ids]), logits.clone())
    assert torch.equal(ours, theirs)


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    one = request(prompt=(1, 2, 3), sampled=(3, 4, 4), presence_penalty=0.5, frequency_penalty=0.25)
    sampler = Sampler(LabelSets({EOS}))
    sampler.add(one)
    logits = torch.zeros(1, 6)
    sampler._apply_penalties(logits, [one])
    assert logits.tolist() == [[0.0, 0.0, 0.0, -0.75, -1.0, 0.0]]


def test_penalties_go_on_with_the_tokens_that_a_request_gains() -> None:
    one = request(prompt=(0,), frequency_penalty=1.0)
    sampler = Sampler(LabelSets({EOS}))
    sampler.add(one)
    logits = torch.tensor([[0.0, 2.5, 2.0]])
    for expected in (1, 2, 1, 2, 1):
        token_id = sampler.sample(logits, [one]).token_ids[0]
        assert token_id == expected
        one.token_ids.append(token_id)
    assert logits.tolist() == [[0.0, 2.5, 2.0]]  # the caller's stay as they are


def test_a_resumed_request_is_penalised_for_what_it_had_sampled() -> None:
    logits = torch.tensor([[0.0, 2.5, 2.0]])
    resumed = request(prompt=(0,), sampled=(1,), frequency_penalty=1.0)
    assert sample(logits, resumed).token_ids == [2]


@pytest.mark.parametrize(
    ("options", "warper"),
    [
        ({"top_k": 5}, ("TopKLogitsWarper", 5)),
        ({"top_p": 0.7}, ("TopPLogitsWarper", 0.7)),
        ({"min_p": 0.1}, ("MinPLogitsWarper", 0.1)),
        ({"temperature": 0.4}, None),
    ],
)
def test_drawn_tokens_are_those_that_hugging_faces_filters_keep(options: dict[str, Any], warper: Any) -> None:
    import transformers

    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(11)) * 2
    temperature = options.get("temperature", 1.0)
    theirs = transformers.TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1.0 else logits
    if warper is not None:
        name, value = warper
        theirs = getattr(transformers, name)(value)(None, theirs.clone())
    expected = theirs.softmax(-1)[0]
    num_draws = 3000
    params = {"temperature": 1.0, **options}
    requests = [request(i, seed=i, **params) for i in range(num_draws)]
    counts = Counter(sample(logits.expand(num_draws, -1), *requests).token_ids)
    assert set(counts) <= set(expected.nonzero().squeeze(-1).tolist())
    chi_square = sum(
        (counts[i] - num_draws * p) ** 2 / (num_draws * p) for i, p in enumerate(expected.tolist()) if p > 0
    )
    degrees = int((expected > 0).sum()) - 1
    # Three standard deviations above the mean; the seeds are fixed, so this holds for ever or never.
    assert chi_square < degrees + 3 * math.sqrt(2 * degrees) + 3


def test_the_same_seed_and_position_draw_the_same_token_after_a_preemption() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(2))
    straight = request(seed=77, temperature=1.0)
    drawn = []
    sampler = Sampler(LabelSets({EOS}))
    sampler.add(straight)
    for _ in range(8):
        drawn.append(sampler.sample(logits, [straight]).token_ids[0])
        straight.token_ids.append(drawn[-1])
    resumed = request(seed=77, sampled=tuple(drawn[:5]), temperature=1.0)
    assert sample(logits, resumed).token_ids == [drawn[5]]
    assert len(set(drawn)) > 4


def test_log_probabilities_are_of_the_models_own_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    one = request(prompt=(3,), temperature=0.5, repetition_penalty=10.0, top_k=1, logprobs=2)
    sampled = sample(logits, one)
    expected = logits.log_softmax(-1)[0]
    result = sampled.logprobs[0]
    assert result is not None
    assert sampled.token_ids == [2]  # 3 was in the prompt
    assert result.token_id == 2
    assert result.logprob == pytest.approx(float(expected[2]), abs=1e-6)
    assert result.top_token_ids == (3, 2)
    assert result.top_logprobs == pytest.approx((float(expected[3]), float(expected[2])), abs=1e-6)


def test_log_probabilities_are_given_as_each_request_asks() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(5))
    sampled = sample(logits, request(0), request(1, logprobs=0), request(2, logprobs=20))
    assert sampled.logprobs[0] is None
    lengths = [len(result.top_token_ids) for result in sampled.logprobs if result is not None]
    assert lengths == [0, 20]
    last = sampled.logprobs[2]
    assert last is not None
    assert list(last.top_logprobs) == sorted(last.top_logprobs, reverse=True)
    assert last.top_token_ids[0] == last.token_id == sampled.token_ids[2]


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1.0}, {"repetition_penalty": 2.0, "logprobs": 1}, {"temperature": 1.0, "top_k": 2}],
)
def test_nan_and_infinity_fail_their_own_row_only(params: dict[str, Any]) -> None:
    logits = torch.zeros(4, 12)
    logits[0, 3] = float("nan")
    logits[1, 3] = float("inf")
    logits[3, 3] = float("-inf")
    sampled = sample(logits, *(request(i, **params) for i in range(4)))
    assert sampled.finite == [False, False, True, True]
    assert sampled.logprobs[0] is None
    assert sampled.logprobs[1] is None


LABELS = ((4,), (5, 6))


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}, {"temperature": 1.0}, {"presence_penalty": 0.1}])
def test_a_label_request_draws_only_what_can_still_spell_a_label(params: dict[str, Any]) -> None:
    logits = torch.zeros(1, 12)
    logits[0, 8] = 100.0
    logits[0, 5] = 30.0
    assert sample(logits, request(labels=LABELS, **params)).token_ids == [5]
    assert sample(logits, request(labels=LABELS, sampled=(5,), **params)).token_ids == [6]
    assert sample(logits, request(labels=((5,), (5, 6)), sampled=(5,), **params)).token_ids[0] in (6, EOS)


def test_a_label_request_with_infinite_allowed_logits_is_not_finite() -> None:
    logits = torch.zeros(1, 12)
    logits[0, 4] = logits[0, 5] = float("-inf")
    assert sample(logits, request(labels=LABELS)).finite == [False]
    assert sample(logits, request(labels=LABELS, logprobs=1)).finite == [False]


def test_log_probabilities_of_a_label_are_not_masked() -> None:
    logits = torch.tensor([[0.0] * 12])
    result = sample(logits, request(labels=LABELS, logprobs=3)).logprobs[0]
    assert result is not None
    assert result.logprob == pytest.approx(-math.log(12))


def test_a_removed_request_leaves_nothing_behind() -> None:
    sampler = Sampler(LabelSets({EOS}))
    one = request(frequency_penalty=1.0)
    sample(torch.zeros(1, 4), one, sampler=sampler)
    sampler.remove(one.request_id)
    sampler.remove(one.request_id)
    assert sampler._counts == {}


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 2.0]),
        "top_k": st.sampled_from([0, 1, 3]),
        "top_p": st.sampled_from([0.5, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "logprobs": st.sampled_from([None, 0, 2]),
    }
)


@settings(max_examples=80, deadline=None)
@given(
    params=st.lists(PARAMS, min_size=2, max_size=7),
    with_labels=st.lists(st.booleans(), min_size=7, max_size=7),
    seed=st.integers(0, 10_000),
    order=st.randoms(use_true_random=False),
)
def test_what_a_row_samples_does_not_depend_on_the_rows_beside_it(
    params: list[dict[str, Any]], with_labels: list[bool], seed: int, order: Any
) -> None:
    logits = torch.randn(len(params), 64, generator=torch.Generator().manual_seed(seed)).mul(2)
    requests = [
        request(i, prompt=(1, 2, 3), sampled=() if bound else (2, 5, 5), seed=seed + i, labels=LABELS * bound, **some)
        for i, (some, bound) in enumerate(zip(params, with_labels, strict=False))
    ]
    together = sample(logits, *requests)
    rows = list(range(len(requests)))
    order.shuffle(rows)
    shuffled = sample(logits[rows], *(requests[row] for row in rows))
    for place, row in enumerate(rows):
        alone = sample(logits[row : row + 1], requests[row])
        assert alone.token_ids[0] == together.token_ids[row] == shuffled.token_ids[place]
        assert alone.logprobs[0] == together.logprobs[row] == shuffled.logprobs[place]
