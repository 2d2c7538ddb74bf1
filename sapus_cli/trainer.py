"""A model, its data shard and its local optimizer over one flat state vector.

A driver moves state by reading and writing `Trainer.vector`; the model's own tensors are views into it, so nothing
is packed or unpacked. Nothing here knows of strategies, servers or time.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from sapus_cli.errors import UserError, unknown
from sapus_cli.workloads import check_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sapus_cli.workloads.data import DataSet

OPTIMIZERS = ("sgd", "adamw")
NULL_LOSS = 1.0
"""Of every step and evaluation of the data set `null`."""


def usable_device(name: torch.device | str) -> torch.device:
    """The device of this name.

    Raises:
        UserError: torch does not know it or cannot use it here.
    """
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"device '{name}' cannot be used here ({reason}); give cpu") from None


class FlatModel:
    """A module whose state lies in one vector.

    The module is taken over: it is moved to the device, and its tensors become views. A module that already belongs
    to one must not be given to a second.

    Attributes:
        module: the module itself.
        vector: state vector `(d,)`, float32: first the trainable parameters in the order of `named_parameters`, a tied
            one once, then any frozen ones, then the floating-point buffers that belong to the module's state (the
            statistics of BatchNorm). Integer buffers, and those that a module does not save, stay outside.
        grad: `(n_params,)`, the gradients of the trainable parameters; each parameter's `grad` is a view into it.
        n_params: number of trainable parameters; the first elements of `vector`.
        outside: the buffers that are not in `vector`.
    """

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        device = usable_device(device)
        self.module = module.to(device=device, dtype=torch.float32)
        trainable, state = self._entries()
        self._layout = [
            (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in chain(trainable, state)
        ]
        self.n_params = sum(tensor.numel() for _, tensor in trainable)
        d = self.n_params + sum(tensor.numel() for _, tensor in state)
        self.vector = torch.empty(d, dtype=torch.float32, device=device)
        self.grad = torch.zeros(self.n_params, dtype=torch.float32, device=device)
        at = 0
        for _, tensor in chain(trainable, state):
            view = self.vector[at : at + tensor.numel()].view(tensor.shape)
            view.copy_(tensor.detach())
            tensor.data = view
            if at < self.n_params:
                tensor.grad = self.grad[at : at + tensor.numel()].view(tensor.shape)
            at += tensor.numel()
        inside = {name for name, _ in state}
        self.outside = [buffer for name, buffer in self.module.named_buffers() if name not in inside]

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, over name, shape and dtype of everything in `vector`, in its order."""
        return hashlib.sha256(repr(self._layout).encode()).hexdigest()

    def _entries(self) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, torch.Tensor]]]:
        """The trainable parameters; and what is state but gets no gradient."""
        parameters = list(self.module.named_parameters())
        saved = self.module.state_dict().keys()
        trainable: list[tuple[str, torch.Tensor]] = [(name, p) for name, p in parameters if p.requires_grad]
        state: list[tuple[str, torch.Tensor]] = [(name, p) for name, p in parameters if not p.requires_grad]
        state += [(name, b) for name, b in self.module.named_buffers() if b.is_floating_point() and name in saved]
        return trainable, state


@dataclass(frozen=True)
class OptimizerSpec:
    """Which local optimizer takes the steps. What is not named here has torch's default.

    Attributes:
        name: "sgd" or "adamw".
        lr: learning rate.
        momentum: of sgd, in [0, 1). AdamW has none (its betas are 0.9 and 0.999).
        weight_decay: an L2 term in the gradient for sgd; decoupled for adamw (Loshchilov and Hutter 2019).

    Raises:
        UserError: a value is out of range.
    """

    name: str
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise unknown("optimizer", self.name, OPTIMIZERS)
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UserError(f"learning rate {self.lr:g}: must be a number above 0")
        if not 0 <= self.momentum < 1:
            raise UserError(f"momentum {self.momentum:g}: must lie in [0, 1)")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise UserError(f"weight decay {self.weight_decay:g}: must be a number of at least 0")
        if self.name == "adamw" and self.momentum != 0:
            raise UserError(f"momentum {self.momentum:g}: adamw has none; leave it out or take sgd")

    def make(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """The optimizer over one flat parameter `(n,)`.

        Both rules work element by element, so that one flat parameter gives what one parameter a tensor would.
        """
        if self.name == "sgd":
            return torch.optim.SGD([parameter], lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        return torch.optim.AdamW([parameter], lr=self.lr, weight_decay=self.weight_decay)


class _Batches:
    """Samples on the device, as a model takes them: images float32 and normalised, numbers int64."""

    def __init__(self, data: DataSet, device: torch.device) -> None:
        self._is_image = data.kind == "image"
        self._device = device
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1) for values in (data.mean, data.std)
        )

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = x.to(self._device), y.to(self._device, torch.int64)
        if self._is_image:
            return x.sub(self._mean).div_(self._std), y  # the difference is float32, and never the data set itself
        return x.to(torch.int64), y


class Trainer:
    """One worker's training: a local state, a shard of the data, a local optimizer.

    The order of samples depends on seed, worker and the number of the step alone. The worker goes through its shard
    in passes, each in a new random order; batches are always full, so what a pass leaves over that fills no batch is
    dropped (another pass drops other samples). If the shard is smaller than a batch, the batch is the shard.

    Attributes:
        vector: the local state `(d,)`, float32; `step` changes it, and so may the caller between steps.
        flat: the model behind it, its own or a shared one.
        steps: number of steps taken.
        batch_size: samples in each minibatch: what was asked for, or the size of a smaller shard.
    """

    def __init__(
        self,
        model: nn.Module | FlatModel,
        data: DataSet,
        indices: torch.Tensor,
        batch_size: int,
        optimizer: OptimizerSpec,
        seed: int,
        worker: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Set up at step 0.

        Args:
            model: a module is copied, not changed. A `FlatModel` is shared: any number of trainers that step in turns
                compute on it, each with a state of its own that begins as the model's; `device` must be its device.
            data: the whole data set.
            indices: this worker's samples, `(n,)` int64 into `data.train_x`.
            batch_size: samples in a minibatch.
            optimizer: what takes the steps.
            seed: seed of the run.
            worker: rank of this worker.
            device: where to compute.

        Raises:
            UserError: the shard is empty, the batch size is below 1, or the device cannot be used.
        """
        check_seed(seed)
        if batch_size < 1:
            raise UserError(f"batch size {batch_size}: must be at least 1")
        if len(indices) == 0:
            raise UserError(f"worker {worker} has no training samples; give fewer workers")
        self._is_shared = isinstance(model, FlatModel)
        self.flat = model if isinstance(model, FlatModel) else FlatModel(copy.deepcopy(model), device)
        self.flat.module.train()
        self.vector = self.flat.vector.clone() if self._is_shared else self.flat.vector
        self._outside = [buffer.clone() if self._is_shared else buffer for buffer in self.flat.outside]
        self.steps = 0
        self.batch_size = min(batch_size, len(indices))
        self._data, self._indices = data, indices.cpu()
        self._batches = _Batches(data, self.vector.device)
        self._spec = optimizer
        self._parameter = nn.Parameter(self.vector[: self.flat.n_params].detach())
        self._parameter.grad = self.flat.grad
        self._optimizer = optimizer.make(self._parameter)
        self._seed, self._worker = seed, worker
        self._pass = -1
        self._order = torch.empty(0, dtype=torch.int64)
        # Of a stream of its own: a sequence that is longer by one number than that of any pass.
        self._noise_seed = int(np.random.SeedSequence(seed, spawn_key=(worker, 0, 1)).generate_state(1)[0])
        on_cuda = self.vector.device.type == "cuda"
        self._generator = (
            torch.cuda.default_generators[self.vector.device.index] if on_cuda else torch.default_generator
        )

    def step(self) -> tuple[float, int]:
        """Take one step in place on `vector`: forward, backward, optimizer.

        Returns:
            The mean loss of the minibatch, before the step, and the number of its samples.
        """
        loss = self._compute_gradient(self.sample_indices(self.steps), self.steps)
        self._optimizer.step()
        self.steps += 1
        return loss.item(), self.batch_size

    def forget(self) -> None:
        """Drop what the optimizer has accumulated: after divergence a velocity may hold what is not a number."""
        self._optimizer = self._spec.make(self._parameter)
        self.flat.grad.zero_()

    def warm_up(self) -> None:
        """Take a step that leaves no trace but what torch sets up at its first use, so that the first one is not slow.

        Raises:
            UserError: the model cannot be trained on batches of this size.
        """
        state = copy.deepcopy([self.vector, *self._outside])
        try:
            self._compute_gradient(self._indices[: self.batch_size], 0)
        except ValueError as error:  # BatchNorm, if a channel has a single value
            raise UserError(f"batch size {self.batch_size}: the model cannot be trained on it ({error})") from None
        self._spec.make(self._parameter).step()
        for tensor, before in zip([self.vector, *self._outside], state, strict=True):
            tensor.copy_(before)
        self.flat.grad.zero_()

    def sample_indices(self, step: int) -> torch.Tensor:
        """Which training samples make up the minibatch of a step (0, 1, ...): `(batch_size,)`, int64."""
        n_batches = len(self._indices) // self.batch_size
        number, batch = divmod(step, n_batches)
        if number != self._pass:
            rng = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(self._worker, number)))
            self._order = self._indices[torch.from_numpy(rng.permutation(len(self._indices)))]
            self._pass = number
        return self._order[batch * self.batch_size : (batch + 1) * self.batch_size]

    def _compute_gradient(self, indices: torch.Tensor, step: int) -> torch.Tensor:
        """Leave the gradient of these samples in `flat.grad`; returns their mean loss, a scalar."""
        x, y = self._batches(self._data.train_x[indices], self._data.train_y[indices])
        self.flat.grad.zero_()
        with self._own_state(), self._own_noise(step):
            loss = _loss(self.flat.module(x), y, "mean")
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @contextlib.contextmanager
    def _own_state(self) -> Iterator[None]:
        """Have this worker's state in the model, and take back what a pass changes beside the gradient."""
        if not self._is_shared:
            yield
            return
        self.flat.vector.copy_(self.vector)
        for theirs, own in zip(self.flat.outside, self._outside, strict=True):
            theirs.copy_(own)
        yield
        n = self.flat.n_params
        self.vector[n:].copy_(self.flat.vector[n:])
        for theirs, own in zip(self.flat.outside, self._outside, strict=True):
            own.copy_(theirs)

    @contextlib.contextmanager
    def _own_noise(self, step: int) -> Iterator[None]:
        """Let dropout draw from this worker's and step's own numbers, whoever else draws in this process."""
        before = self._generator.get_state()
        self._generator.manual_seed(self._noise_seed + step)
        try:
            yield
        finally:
            self._generator.set_state(before)


class NullTrainer(Trainer):
    """Training without arithmetic, to measure everything else: a step adds 1 to the first element of the state."""

    @cached_property
    def _first(self) -> torch.Tensor:
        return self.vector[:1]

    def step(self) -> tuple[float, int]:
        """Take one step. The loss is always the same."""
        self._first.add_(1.0)
        self.steps += 1
        return NULL_LOSS, self.batch_size

    def warm_up(self) -> None:
        """Nothing: there is nothing to set up."""


class Tested(NamedTuple):
    """What a state is worth on the test set.

    Attributes:
        loss: mean loss.
        accuracy: share of correct predictions, 0 to 1.
        worst_class: the least such share, of any class of the test set; None where samples have none, as in text.
    """

    loss: float
    accuracy: float
    worst_class: float | None


class Evaluator:
    """Measures states on the test set. It works on a copy of the model."""

    def __init__(
        self, model: nn.Module, data: DataSet, device: torch.device | str = "cpu", batch_size: int = 256
    ) -> None:
        """Set up.

        Args:
            model: is copied, not changed.
            data: whose test set is used.
            device: where to compute.
            batch_size: samples in one forward pass; no more than a matter of speed and memory.

        Raises:
            UserError: the device cannot be used.
        """
        self._flat = FlatModel(copy.deepcopy(model), device)
        self._flat.module.eval()
        self._data = data
        self._batches = _Batches(data, self._flat.vector.device)
        self._batch_size = batch_size
        self._result: Tested | None = None

    @torch.no_grad()
    def evaluate(self, vector: torch.Tensor) -> Tested:
        """Loss and accuracy of a state on the whole test set, in evaluation mode; for text over all next characters.

        Args:
            vector: the state `(d,)`, on any device.

        Raises:
            ValueError: the vector has another shape than the model's.
        """
        if vector.shape != self._flat.vector.shape:
            raise ValueError(f"state of shape {tuple(vector.shape)} for a model of {tuple(self._flat.vector.shape)}")
        # Of a state that has not moved a bit, everything is known.
        if self._result is None or not torch.equal(vector.view(torch.int32), self._flat.vector.view(torch.int32)):
            self._flat.vector.copy_(vector)
            self._result = self._evaluate()
        return self._result

    def _evaluate(self) -> Tested:
        loss = 0.0
        right = []
        test = (torch.split(part, self._batch_size) for part in (self._data.test_x, self._data.test_y))
        for x, y in (self._batches(*part) for part in zip(*test, strict=True)):
            logits = self._flat.module(x)
            loss += _loss(logits, y, "sum").item()
            right.append((logits.argmax(-1) == y).cpu())
        hits = torch.cat(right)
        worst = self._worst_class(hits) if self._data.kind == "image" else None
        return Tested(loss / hits.numel(), int(hits.sum()) / hits.numel(), worst)

    def _worst_class(self, hits: torch.Tensor) -> float:
        """The least share of `hits`, `(n,)` booleans, among the samples of a class."""
        y = self._data.test_y
        sizes, right = torch.bincount(y), torch.bincount(y[hits], minlength=self._data.n_classes)
        present = sizes.nonzero()
        return float((right[present].double() / sizes[present]).min())


class NullEvaluator(Evaluator):
    """Measures nothing: loss and accuracy are always the same."""

    def evaluate(self, vector: torch.Tensor) -> Tested:  # noqa: ARG002 - it is not looked at
        """The same loss, and an accuracy of 0, whatever the state."""
        return Tested(NULL_LOSS, 0.0, None)


def trainer_of(data: DataSet) -> type[Trainer]:
    """What trains on a data set."""
    return NullTrainer if data.kind == "null" else Trainer


def evaluator_of(data: DataSet) -> type[Evaluator]:
    """What measures states on a data set."""
    return NullEvaluator if data.kind == "null" else Evaluator


def _loss(logits: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
    """Cross entropy of `(n, K)` with `(n,)`, or of `(n, T, K)` with `(n, T)` over all of its n * T characters."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction=reduction)
