"""The processes that hold one model between them, a part of every layer each: what they exchange while they compute.

Alone is the usual case and exchanges nothing. engine.tensor_parallel starts the others and tells them what to compute.
"""

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

COLLECTIVE_SECONDS = 300.0  # for one exchange outside a CUDA graph; beyond it the group has failed
_HOST = "127.0.0.1"  # all ranks run on one machine
# Where nobody has set them. Ranks meet on loopback. Multicast over NVLink takes rights that not every machine gives,
# and two GPUs gain nothing by it.
_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0"} | (
    {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else {}
)


@dataclass(frozen=True, slots=True)
class Group:
    """This process's place among them. Every rank makes the same calls in the same order; all but `minimum` may be
    captured in a CUDA graph. NCCL between GPUs, gloo between CPUs.
    """

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x, now the sum of all ranks' x."""
        if self.size > 1 and x.numel():
            dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """(size, *x.shape): every rank's x."""
        if self.size == 1:
            return x[None]
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        if x.numel():
            dist.all_gather_into_tensor(gathered, x.contiguous())
        return gathered.view(self.size, *x.shape)

    def minimum(self, value: int, device: torch.device) -> int:
        """The least of all ranks' values; waits for them."""
        if self.size == 1:
            return value
        least = torch.tensor([value], dtype=torch.int64, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least.item())


def open_store() -> TCPStore:
    """Rank 0's store, on a free port, by which the ranks find one another. Nobody else can reach it."""
    listener = socket.create_server((_HOST, 0))  # by itself the store would listen on every address
    port = listener.getsockname()[1]
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def join(store: TCPStore | int, rank: int, size: int, device: torch.device) -> Group:
    """Waits for all ranks. `store`: rank 0's own, elsewhere its port. Sets the process's CUDA device and group."""
    if isinstance(store, int):
        store = TCPStore(_HOST, store, is_master=False)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        device_id=device if is_cuda else None,
    )
    return Group(rank, size)


def leave() -> None:
    """Ends the process's group, so that it may join another."""
    dist.destroy_process_group()
