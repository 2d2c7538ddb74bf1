"""Other libraries at the same work, each as its own documentation uses it."""

from __future__ import annotations

import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from sapus_cli.drivers.bench.plan import FLOAT32_BYTES, Serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from sapus_cli.drivers.bench.child import Exchange
    from sapus_cli.drivers.bench.plan import Job
    from sapus_cli.strategy import Vec

T = TypeVar("T")

NAME = "sapus-bench"
LEAST_STORE_BYTES = 200 * 2**20
STORE_VECTORS = 8
"""Vectors a worker that Ray's object store has room for."""

PATIENCE = timedelta(seconds=100)
GRPC_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),  # it would be asked for loopback too
)


def _ray(token: str) -> Any:
    """Ray, kept to the loopback device and silent.

    The token is one for this measurement alone; without, Ray would write one into the user's home folder.
    """
    os.environ |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on every system: the node's address is 127.0.0.1
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
    }
    import ray  # noqa: PLC0415 - not everyone has it

    return ray


def serve_ray(parent: Connection, job: Job) -> Vec:
    """Start Ray with an actor that holds the state."""
    token = secrets.token_hex(32)
    ray = _ray(token)
    store = LEAST_STORE_BYTES + STORE_VECTORS * job.workers * FLOAT32_BYTES * job.elements
    here = ray.init(
        num_cpus=1,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=store,
        namespace=NAME,
        log_to_driver=False,
        logging_level="error",
        _temp_dir=os.path.join(job.folder, "ray"),  # noqa: PTH118 - Ray wants a text
    )

    class ParameterServer:
        """An actor has one thread: what it returns is copied out before the next call begins."""

        def __init__(self, elements: int) -> None:
            torch.set_num_threads(1)
            self.x = torch.zeros(elements)

        def exchange(self, push: Any) -> Any:
            self.x.add_(torch.from_numpy(push))
            return self.x.numpy()

        def state(self) -> Any:
            return self.x.numpy()

        def pid(self) -> int:
            return os.getpid()

    actor = ray.remote(ParameterServer).options(name=NAME, num_cpus=1).remote(job.elements)
    parent.send(Serving((here.address_info["gcs_address"], token), ray.get(actor.pid.remote())))
    parent.recv()
    x = torch.tensor(ray.get(actor.state.remote()))
    parent.recv()
    ray.shutdown()
    return x


@contextmanager
def connect_ray(place: tuple[str, str], _job: Job, _rank: int) -> Iterator[Exchange]:
    """A driver of its own; what it gets lies in the object store, which it reads without a copy."""
    address, token = place
    ray = _ray(token)
    ray.init(address=address, namespace=NAME, log_to_driver=False, logging_level="error")
    actor = ray.get_actor(NAME)

    def exchange(push: Vec) -> Vec:
        return torch.from_numpy(ray.get(actor.exchange.remote(push.numpy())))

    yield exchange
    ray.shutdown()


class _Shared:
    """The state of a server whose calls come in several threads."""

    def __init__(self, elements: int) -> None:
        self.x = torch.zeros(elements)
        self._lock = threading.Lock()

    def exchange(self, push: Vec, copy: Callable[[Vec], T]) -> T:
        """Add, and return a copy of the sum."""
        with self._lock:
            return copy(self.x.add_(push))


_state: _Shared | None = None


def _rpc_exchange(push: Vec) -> Vec:
    if _state is None:
        raise RuntimeError("there is no state here")
    return _state.exchange(push, torch.clone)


def serve_rpc(parent: Connection, job: Job) -> Vec:
    """torch.distributed.rpc over TensorPipe; a call is a function that runs here."""
    global _state  # noqa: PLW0603 - a function that is called by its name finds the state so
    _state = _Shared(job.elements)
    parent.send(Serving(None))
    with _rpc("server", 0, job):
        pass
    return _state.x


@contextmanager
def connect_rpc(_address: None, job: Job, rank: int) -> Iterator[Exchange]:
    """Each exchange is one synchronous call."""
    with _rpc(f"worker-{rank}", rank + 1, job) as rpc:
        yield lambda push: rpc.rpc_sync("server", _rpc_exchange, args=(push,))


@contextmanager
def _rpc(name: str, rank: int, job: Job) -> Iterator[Any]:
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    from torch import distributed  # noqa: PLC0415

    rpc: Any = distributed.rpc
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=max(4, job.workers),
        init_method=f"file://{job.folder}/rendezvous",
        rpc_timeout=PATIENCE.total_seconds(),
    )
    rpc.init_rpc(name, rank=rank, world_size=job.workers + 1, rpc_backend_options=options)
    yield rpc
    rpc.shutdown()  # waits for everybody


def _loopback() -> str:
    """The name of the loopback interface."""
    import psutil  # noqa: PLC0415

    interfaces = psutil.net_if_addrs()
    return str(next(name for name in interfaces if any(one.address == "127.0.0.1" for one in interfaces[name])))


@contextmanager
def connect_gloo(_address: None, job: Job, rank: int) -> Iterator[Exchange]:
    """An all-reduce of what everybody pushes, which everybody adds to a state of its own.

    One element more counts who wants to go on, so that all do the same number of all-reduces: whoever is done takes
    part with zeros until all are.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    from torch import distributed  # noqa: PLC0415

    distributed.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/rendezvous",
        rank=rank,
        world_size=job.workers,
        timeout=PATIENCE,
    )
    x = torch.zeros(job.elements)
    reduced = torch.zeros(job.elements + 1)
    total = reduced[:-1]

    def exchange(push: Vec) -> Vec:
        total.copy_(push)
        reduced[-1] = 1
        distributed.all_reduce(reduced)
        return x.add_(total)

    yield exchange
    while reduced[-1] > 0:
        reduced.zero_()
        distributed.all_reduce(reduced)
        x.add_(total)
    distributed.destroy_process_group()


def serve_grpc(parent: Connection, job: Job) -> Vec:
    """A generic handler of raw bytes, without protobuf."""
    import grpc  # noqa: PLC0415 - not everyone has it

    shared = _Shared(job.elements)

    def exchange(request: bytes, _context: object) -> bytes:
        return shared.exchange(torch.frombuffer(request, dtype=torch.float32), lambda x: x.numpy().tobytes())

    server = grpc.server(ThreadPoolExecutor(max_workers=job.workers), options=GRPC_OPTIONS)
    handlers = {"Exchange": grpc.unary_unary_rpc_method_handler(exchange)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    parent.send(Serving(f"127.0.0.1:{port}"))
    parent.recv()
    parent.recv()
    server.stop(None).wait()
    return shared.x


@contextmanager
def connect_grpc(address: str, _job: Job, _rank: int) -> Iterator[Exchange]:
    """Each exchange is one unary call."""
    import grpc  # noqa: PLC0415

    with grpc.insecure_channel(address, options=GRPC_OPTIONS) as channel:
        call = channel.unary_unary(f"/{NAME}/Exchange")

        def exchange(push: Vec) -> Vec:
            return torch.frombuffer(call(push.numpy().tobytes()), dtype=torch.float32)

        yield exchange
