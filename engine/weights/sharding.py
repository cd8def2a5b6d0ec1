"""Which part of each parameter a rank holds, where several hold one model.

Heads and the MLP's middle are divided, so each layer's second products (output, down) give partial sums of all of its
result; embedding and head are divided by rows of the vocabulary. (Megatron-LM, https://arxiv.org/abs/1909.08053)
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from engine.group import Group
from engine.model_config import ModelConfig
from schemas.errors import SettingsError


def check_divisible(config: ModelConfig, size: int) -> None:
    """Raises SettingsError where `size` ranks cannot divide this model."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    shape = f"the model has {heads} heads, {kv_heads} key-value heads and an MLP of {config.intermediate_size:,}"
    divides_kv = kv_heads % size == 0 or size % kv_heads == 0
    if heads % size or config.intermediate_size % size or not divides_kv:
        raise SettingsError(f"engine.tensor_parallel is {size}, which does not divide what it must: {shape}")


def shard_config(config: ModelConfig, group: Group) -> ModelConfig:
    """The shape of one rank's layers. Of fewer key-value heads than ranks, each rank holds one, some hold the same."""
    return replace(
        config,
        num_heads=config.num_heads // group.size,
        num_kv_heads=max(1, config.num_kv_heads // group.size),
        intermediate_size=config.intermediate_size // group.size,
    )


def shard_parameters(
    parameters: Iterable[tuple[str, torch.Tensor]], config: ModelConfig, group: Group
) -> Iterator[tuple[str, torch.Tensor]]:
    """The rank's part of each of a model's whole parameters, in their order; `config`: of the whole model."""
    for name, tensor in parameters:
        yield name, tensor if group.size == 1 else _part(name, tensor, config, group)


def _part(name: str, tensor: torch.Tensor, config: ModelConfig, group: Group) -> torch.Tensor:
    match name.split(".", 2)[2] if name.startswith("layers.") else name:
        case "embedding.weight" | "head.weight":
            return _vocabulary_rows(tensor, group)
        case "qkv.weight" | "qkv.bias":
            head_size = config.head_size
            kv_rows = max(1, config.num_kv_heads // group.size) * head_size
            kv_first = group.rank * config.num_kv_heads // group.size * head_size
            query, key, value = torch.split(tensor, [config.query_size, config.kv_size, config.kv_size])
            first, rows = group.rank * config.query_size // group.size, config.query_size // group.size
            return torch.cat(
                [query[first : first + rows], *(part[kv_first : kv_first + kv_rows] for part in (key, value))]
            )
        case "gate_up.weight" | "gate_up.bias":
            return torch.cat([half.chunk(group.size)[group.rank] for half in tensor.chunk(2)])
        case "output.weight" | "down.weight":
            return tensor.chunk(group.size, dim=1)[group.rank].contiguous()
        case "output.bias" | "down.bias":
            return tensor if group.rank == 0 else torch.zeros_like(tensor)  # it enters the sum once
    return tensor


def _vocabulary_rows(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """(ceil(vocab_size / size), hidden_size): ids [rank * rows, (rank + 1) * rows); rows past the last are zero."""
    rows = -(-tensor.shape[0] // group.size)
    part = tensor.new_zeros((rows, *tensor.shape[1:]))
    mine = tensor[group.rank * rows : (group.rank + 1) * rows]
    part[: mine.shape[0]] = mine
    return part
