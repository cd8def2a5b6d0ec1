"""What crosses between the worker and the engine process. Of the standard library only, so that the engine imports on a
machine that has torch and nothing else of ours. What is made once a request is a named tuple: half the time of a frozen
dataclass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from schemas.errors import Failure

Kind = Literal["generate", "classify"]
FinishReason = Literal["stop", "length", "abort"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # of one of them
MAX_STOP_TOKEN_IDS = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Temperature 0 is greedy; a value out of range raises ValueError with the value in it."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: derived from the document's identity, so a rerun draws the same
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None  # None: none; 0: of the chosen token; n: and of the n most likely

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 0, "max_tokens", self.max_tokens, "0 or more")
        _require(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "0 to 100")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0, at most 1")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "0 to 1")
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "0 to 2^63 - 1")
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        _require(all(self.stop), "stop", self.stop, "strings of at least one character")
        longest = max(map(len, self.stop), default=0)
        _require(longest <= MAX_STOP_CHARACTERS, "stop", f"{longest} characters", f"at most {MAX_STOP_CHARACTERS}")
        num_ids = len(self.stop_token_ids)
        _require(num_ids <= MAX_STOP_TOKEN_IDS, "stop_token_ids", num_ids, f"at most {MAX_STOP_TOKEN_IDS} ids")
        _require(all(0 <= t < 2**31 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids")
        _require(0.0 < self.repetition_penalty <= 10.0, "repetition_penalty", self.repetition_penalty, "above 0 to 10")
        _require(-10.0 <= self.presence_penalty <= 10.0, "presence_penalty", self.presence_penalty, "-10 to 10")
        _require(-10.0 <= self.frequency_penalty <= 10.0, "frequency_penalty", self.frequency_penalty, "-10 to 10")
        asked = self.logprobs if self.logprobs is not None else 0
        _require(0 <= asked <= MAX_LOGPROBS, "logprobs", self.logprobs, f"0 to {MAX_LOGPROBS}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; expected {expected}")


class InferenceRequest(NamedTuple):
    """One prompt for the engine. `request_id` is unique among the requests that the engine has not ended."""

    request_id: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    seed: int  # what the draws start from; sampling.seed, or derived from the document
    kind: Kind = "generate"
    block_hashes: tuple[bytes, ...] = ()  # chained, one per full block; empty: the engine computes them
    label_token_ids: tuple[tuple[int, ...], ...] = ()  # classify: each label's token ids, in the task's order
    priority: int = 0  # higher goes first


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One sampled token's log-probability, and the most likely tokens' at its position (descending)."""

    token_id: int
    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class RequestTiming(NamedTuple):
    """Milliseconds inside the engine: waiting for the first step, until the first token, until the last."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class InferenceOutput(NamedTuple):
    """A request's end: its tokens and text, or its failure. Every request has exactly one."""

    request_id: int
    token_ids: tuple[int, ...] = ()  # all sampled tokens, those of the stop included
    text: str = ""  # cut exactly at the stop
    finish_reason: FinishReason | None = None  # None where failure is set
    stop_reason: str | int | None = None  # the stop string, or the stop token's id
    label_id: int | None = None  # classify: index of the label that was spelled
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    timing: RequestTiming = RequestTiming()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The one model that a worker serves."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    path: str = ""  # a Hugging Face folder or a GGUF file
    name: str = ""  # what rows call it; empty: the folder's or file's name
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    quantization: Literal["none", "fp8"] = (
        "none"  # fp8: weights at load by channel, activations by token; GPUs that can
    )
    device: str = "auto"  # auto: cuda where there is one
    max_model_len: int = 0  # tokens of prompt and output together; 0: what the model was trained for


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the engine packs its steps and its memory. Sizes in tokens unless the name says otherwise."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    max_tokens_per_step: int = 8192
    max_running: int = 256  # requests in a step
    block_size: int = 16
    kv_cache_tokens: int = 0  # 0: from the memory that is left
    memory_fraction: float = 0.9  # of the device's memory, for weights, step and KV cache together
    prefix_caching: bool = True
    num_threads: int = 0  # CPU threads of the matrix products; 0: all cores
    tensor_parallel: int = 1  # devices that hold the model between them, from the model's device on

    def __post_init__(self) -> None:
        _require(self.max_tokens_per_step >= 1, "max_tokens_per_step", self.max_tokens_per_step, "1 or more")
        _require(self.max_running >= 1, "max_running", self.max_running, "1 or more")
        _require(8 <= self.block_size <= 256, "block_size", self.block_size, "8 to 256")
        _require(self.kv_cache_tokens >= 0, "kv_cache_tokens", self.kv_cache_tokens, "0 (automatic) or more")
        _require(0.0 < self.memory_fraction <= 1.0, "memory_fraction", self.memory_fraction, "above 0, at most 1")
        _require(self.num_threads >= 0, "num_threads", self.num_threads, "0 (all cores) or more")
        _require(self.tensor_parallel >= 1, "tensor_parallel", self.tensor_parallel, "1 or more")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine says of itself; the worker checks documents against it."""

    model: str
    identity: bytes  # of weights and adapter: the root of every block hash
    weights: str  # fingerprint, for receipts
    vocab_size: int
    max_model_len: int
    block_size: int
    kv_cache_tokens: int
    device: str
    start_seconds: dict[str, float] = field(default_factory=dict)  # part of start-up -> seconds


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine's start, and gauges of now."""

    num_steps: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_sampled_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    step_seconds: dict[str, float] = field(default_factory=dict)  # schedule, prepare, forward, sample, update -> total
    num_recomputed_tokens: int = 0  # computed, lost to preemption, and computed again
    num_begun_tokens: int = 0  # of prompts that wait no more: they have begun, or ended without
    num_begun_cached_tokens: int = 0  # of these, found in the prefix cache
