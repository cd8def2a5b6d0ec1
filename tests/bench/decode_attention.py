"""Decode attention on a CUDA device: our kernel beside flash-attn 4, in bytes of keys and values a second.

    python -m tests.bench.decode_attention

Qwen2.5-7B's shape (28 heads, 4 key heads, head size 128) in bf16, pages of 16 in random order. Each launch is checked
against the truth, then timed as replays of a CUDA graph of calls that go through several caches, so that no call finds
its keys in the L2. The planned launch stands first, others for comparison. The copy rate is the limit.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import torch

from kernels.decode_attention import DecodeLaunch, decode_attention, decode_attention_reference, plan_decode

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 28, 4, 128, 16
SCALE = HEAD_SIZE**-0.5
CALLS, REPLAYS = 8, 9
# (tile_keys, heads_per_program, num_warps, num_stages): the planned one, and the next best
LAYOUTS = ((16, 2, 4, 4), (16, 2, 2, 3), (32, 1, 1, 3))
SHAPES = (
    (1024, 180), (1024, 384), (768, 512), (512, 512), (384, 1024), (256, 2000), (192, 2048), (128, 2048), (100, 4600),
    (64, 4096), (32, 4096), (8, 8192), (1, 8192), (100, 100), (8, 100),
)  # fmt: skip
Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]


def caches_of(num_rows: int, length: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of layers that share a table, which together pass the L2 by far."""
    device = torch.device("cuda")
    columns = -(-length // BLOCK_SIZE)
    num_blocks = num_rows * columns
    shape = (2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    num_bytes = 2 * 2 * num_blocks * BLOCK_SIZE * NUM_KV_HEADS * HEAD_SIZE
    layers = [
        torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(max(2, -(-800_000_000 // num_bytes)))
    ]
    table = torch.randperm(num_blocks, device=device).int().view(num_rows, columns)
    lengths = torch.full((num_rows,), length, dtype=torch.int32, device=device)
    query = torch.randn(num_rows, NUM_HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=device)
    return layers, table, lengths, query


def milliseconds(
    attend: Attend, layers: list[torch.Tensor], table: torch.Tensor, lengths: torch.Tensor, query: torch.Tensor
) -> float:
    """Median over replays of a graph of CALLS calls, a call's share."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(query, layers[0][0], layers[0][1], table, lengths)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(CALLS):
            layer = layers[call % len(layers)]
            attend(query, layer[0], layer[1], table, lengths)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / CALLS)
    return float(statistics.median(times))


def ours(launch: DecodeLaunch) -> Attend:
    arrivals = torch.zeros(2**18, dtype=torch.int32, device="cuda")

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(query)
        return out, decode_attention(query, keys, values, table, lengths, SCALE, launch, out, arrivals)

    return attend


def flash() -> Attend:
    from flash_attn.cute import flash_attn_varlen_func

    return lambda query, keys, values, table, lengths: flash_attn_varlen_func(
        query[:, None], keys, values, seqused_k=lengths, page_table=table, max_seqlen_q=1,
        max_seqlen_k=table.shape[1] * BLOCK_SIZE, softmax_scale=SCALE, causal=False, window_size=(None, None),
        return_lse=True,
    )  # fmt: skip


def check(launch: DecodeLaunch) -> None:
    """Rows of many lengths against the truth, peaked, so that one wrong key shows; raises AssertionError."""
    torch.manual_seed(0)
    layers, table, lengths, query = caches_of(24, 1100)
    lengths.copy_(torch.tensor([0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, *range(130, 1100, 83)]))
    for peak in (1.0, 6.0):
        for each in (launch, replace(launch, num_splits=5)):
            keys, values = layers[0]
            out, lse = ours(each)(query * peak, keys, values, table, lengths)
            true_out, true_lse = decode_attention_reference(query * peak, keys, values, table, lengths, SCALE)
            error = float((out.float() - true_out.float()).norm() / true_out.float().norm())
            assert error < 5e-3, f"{each}: relative error {error}"
            assert torch.equal(lse[0], true_lse[0])
            torch.testing.assert_close(lse[1:], true_lse[1:], rtol=1e-4, atol=1e-3)


def copy_rate() -> float:
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record()
        target.copy_(source)
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return 2 * 2**32 / float(statistics.median(times)) / 1e9


def report(
    name: str, num_rows: int, length: int, launches: list[DecodeLaunch], baseline: Attend | None,
    mixed: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """A line per launch; `mixed` (num_rows,): lengths of at most `length`."""
    layers, table, lengths, query = caches_of(num_rows, length)
    if mixed is not None:
        lengths.copy_(mixed)
    num_bytes = int(lengths.sum()) * NUM_KV_HEADS * HEAD_SIZE * 2 * 2
    theirs = milliseconds(baseline, layers, table, lengths, query) if baseline is not None else float("nan")
    print(f"{name}: flash-attn {theirs:.4f} ms, {num_bytes / theirs / 1e9:.2f} TB/s", flush=True)
    for i, launch in enumerate(launches):
        took = milliseconds(ours(launch), layers, table, lengths, query)
        layout = (launch.tile_keys, launch.heads_per_program, launch.num_warps, launch.num_stages)
        print(
            f"  {'planned' if i == 0 else '       '} {took:.4f} ms, {num_bytes / took / 1e9:.2f} TB/s,"
            f" {theirs / took:.2f} x: {layout}, {launch.num_splits} splits of {launch.min_split_tiles} tiles"
        )


def main() -> None:
    num_multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"{torch.cuda.get_device_name()}; copy {copy_rate():.2f} TB/s", flush=True)
    for layout in LAYOUTS:
        check(DecodeLaunch(1, 1, *layout))
    baseline = flash() if find_spec("flash_attn") is not None else None
    for num_rows, length in SHAPES:
        planned = plan_decode(num_rows, NUM_HEADS, NUM_KV_HEADS, num_multiprocessors)
        others = [planned, replace(planned, num_splits=1, min_split_tiles=1)]
        others += [replace(planned, num_splits=s) for s in (2, 8) if num_rows >= 100]
        others += [replace(planned, num_splits=planned.num_splits * m // 2) for m in (1, 3) if num_rows < 100]
        others += [replace(planned, tile_keys=t, heads_per_program=h, num_warps=w, num_stages=s,
                           min_split_tiles=planned.min_split_tiles * planned.tile_keys // t)
                   for t, h, w, s in LAYOUTS[1:]]  # fmt: skip
        report(f"{num_rows} x {length}", num_rows, length, others, baseline)
    # As a queue of short questions, analyses and long generations has them.
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1024, 256, 128):
        kinds = torch.multinomial(torch.tensor([0.65, 0.25, 0.10]), num_rows, True, generator=generator)
        mixed = torch.tensor([160, 1150, 4600])[kinds]
        planned = plan_decode(num_rows, NUM_HEADS, NUM_KV_HEADS, num_multiprocessors)
        others = [replace(planned, num_splits=s, min_split_tiles=m) for s in (1, 4, 8) for m in (32, 64, 96)]
        report(f"{num_rows} of 160, 1,150 or 4,600", num_rows, 4600, [planned, *others], baseline, mixed)


if __name__ == "__main__":
    main()
