"""The flat state vector, the local optimizer over it, the order of samples, the evaluation."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from sapus_cli.errors import UserError
from sapus_cli.trainer import Evaluator, FlatModel, OptimizerSpec, Trainer, evaluator_of, trainer_of, usable_device
from sapus_cli.workloads.data import DataSet, load, make_dataset, prepare
from sapus_cli.workloads.models import build_model

if TYPE_CHECKING:
    from collections.abc import Sequence

SGD = OptimizerSpec("sgd", lr=0.1)


@pytest.fixture(scope="module")
def digits() -> DataSet:
    return load(prepare("digits", None, download=False))


@pytest.fixture(scope="module")
def toy() -> DataSet:
    """Two images 1x1x2 of mean 0 and deviation 1, one of each class."""
    part = torch.tensor([[[[1.0, -1.0]]], [[[-1.0, 1.0]]]]), torch.tensor([0, 1])
    return make_dataset("toy", "image", part, part, 2)


def _linear(weight: Sequence[Sequence[float]]) -> nn.Module:
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.tensor(weight)
    return nn.Sequential(nn.Flatten(), layer)


def _noisy() -> nn.Module:
    """A model with all that a step can leave behind: statistics of BatchNorm, and random numbers drawn."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(144, 10)
        )


def _trainer(model: nn.Module, data: DataSet, spec: OptimizerSpec = SGD, seed: int = 0, worker: int = 0) -> Trainer:
    return Trainer(model, data, torch.arange(len(data.train_x)), 32, spec, seed, worker, "cpu")


# --- The flat model ---


def test_parameters_come_first_then_the_statistics_and_integers_stay_outside() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    module[0].weight.data = torch.tensor([1.0, 2.0]).view(2, 1, 1, 1)
    module[0].bias.data = torch.tensor([3.0, 4.0])
    flat = FlatModel(module)
    # Convolution: weight, bias. BatchNorm: weight, bias; then running mean and variance.
    assert flat.vector.tolist() == [1, 2, 3, 4, 1, 1, 0, 0, 0, 0, 1, 1]
    assert flat.n_params == 8
    flat.module(torch.full((2, 1, 1, 1), 1.0))
    # The outputs are 1 + 3 = 4 and 2 + 4 = 6, without variance; BatchNorm takes a tenth of both.
    assert flat.vector[8:].tolist() == pytest.approx([0.4, 0.6, 0.9, 0.9])
    assert int(module.state_dict()["1.num_batches_tracked"]) == 1


def test_the_tensors_of_the_module_share_memory_with_the_vector() -> None:
    flat = FlatModel(_noisy())
    flat.vector.fill_(7)
    state = flat.module.state_dict()
    assert all((value == 7).all() for key, value in state.items() if key != "1.num_batches_tracked")
    assert int(state["1.num_batches_tracked"]) == 0
    flat.module.get_parameter("5.bias").data.fill_(2)
    assert (flat.vector == 2).sum() == 10
    assert flat.vector.is_contiguous()
    assert flat.vector.dtype == torch.float32


def test_gradients_are_written_into_the_flat_vector_and_stay_there() -> None:
    flat = FlatModel(_linear([[0.0, 0.0], [0.0, 0.0]]))
    for _ in range(2):
        flat.grad.zero_()
        flat.module(torch.tensor([[1.0, 2.0]])).sum().backward()
        assert flat.grad.tolist() == [1, 2, 1, 2]
    weight = flat.module.get_parameter("1.weight")
    assert weight.grad is not None
    assert weight.grad.data_ptr() == flat.grad.data_ptr()


def test_tied_parameters_count_once() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    flat = FlatModel(nn.Sequential(first, second))
    assert flat.vector.shape == (9 + 3 + 3,)
    assert second.weight is first.weight


def test_frozen_parameters_are_state_without_a_gradient_and_unsaved_buffers_are_neither() -> None:
    module = nn.Linear(1, 1)
    module.weight.requires_grad = False
    module.weight.data.fill_(5)
    module.bias.data.fill_(3)
    module.register_buffer("constant", torch.tensor([float("-inf")]), persistent=False)
    flat = FlatModel(module)
    assert (flat.vector.tolist(), flat.n_params) == ([3, 5], 1)


def test_a_model_of_another_type_becomes_float32() -> None:
    assert FlatModel(nn.Linear(2, 2).double()).vector.dtype == torch.float32


def test_the_fingerprint_tells_models_apart_and_not_their_values() -> None:
    def fingerprint(*modules: nn.Module) -> str:
        return FlatModel(nn.Sequential(*modules)).fingerprint

    same = fingerprint(nn.Linear(2, 3))
    assert same == fingerprint(nn.Linear(2, 3))
    assert len(same) == 64
    others = [
        fingerprint(nn.Linear(3, 2)),
        fingerprint(nn.Linear(2, 3, bias=False)),
        fingerprint(nn.ReLU(), nn.Linear(2, 3)),
        fingerprint(nn.Linear(2, 3), nn.BatchNorm1d(3)),
    ]
    assert len({same, *others}) == 5


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"device 'toaster' cannot be used here .*; give cpu"):
        usable_device("toaster")
    assert usable_device("cpu") == torch.device("cpu")


# --- The optimizer ---


def test_a_step_of_sgd_worked_out_by_hand(toy: DataSet) -> None:
    trainer = _trainer(_linear([[0.0, 0.0], [0.0, 0.0]]), toy)
    loss, n = trainer.step()
    # Both classes have probability 1/2. The gradient (p - onehot) x^T of either image is [[-.5, .5], [.5, -.5]].
    assert loss == pytest.approx(math.log(2))
    assert n == 2
    assert trainer.vector.tolist() == pytest.approx([0.05, -0.05, -0.05, 0.05])
    assert trainer.steps == 1


def test_a_step_starts_from_what_the_caller_wrote_into_the_vector(toy: DataSet) -> None:
    trainer = _trainer(_linear([[0.0, 0.0], [0.0, 0.0]]), toy)
    trainer.step()
    trainer.vector.zero_()
    loss, _ = trainer.step()
    assert loss == pytest.approx(math.log(2))
    assert trainer.vector.tolist() == pytest.approx([0.05, -0.05, -0.05, 0.05])


@pytest.mark.parametrize(
    "spec",
    [
        OptimizerSpec("sgd", lr=0.1),
        OptimizerSpec("sgd", lr=0.05, momentum=0.9, weight_decay=1e-3),
        OptimizerSpec("adamw", lr=1e-3, weight_decay=0.1),
    ],
)
def test_one_flat_parameter_gives_what_a_parameter_a_tensor_gives(digits: DataSet, spec: OptimizerSpec) -> None:
    model = build_model("cnn", digits, 0)
    trainer = _trainer(model, digits, spec)
    usual: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay)
        if spec.name == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=spec.lr, weight_decay=spec.weight_decay)
    )
    for step in range(10):
        indices = trainer.sample_indices(step)
        x = (digits.train_x[indices].float() - digits.mean[0]) / digits.std[0]
        expected = F.cross_entropy(model(x), digits.train_y[indices])
        usual.zero_grad()
        expected.backward()  # type: ignore[no-untyped-call]
        usual.step()
        loss, _ = trainer.step()
        assert loss == pytest.approx(expected.item(), abs=1e-5)
    flattened = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(trainer.vector, flattened, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("adam", 0.1, 0.0, 0.0), "unknown optimizer 'adam'; did you mean adamw"),
        (("sgd", 0.0, 0.0, 0.0), "learning rate 0: must be a number above 0"),
        (("sgd", math.nan, 0.0, 0.0), "learning rate nan"),
        (("sgd", math.inf, 0.0, 0.0), "learning rate inf"),
        (("sgd", 0.1, 1.0, 0.0), r"momentum 1: must lie in \[0, 1\)"),
        (("sgd", 0.1, 0.0, -1.0), "weight decay -1: must be a number of at least 0"),
        (("adamw", 0.1, 0.9, 0.0), "momentum 0.9: adamw has none"),
    ],
)
def test_a_wrong_optimizer_is_refused(values: tuple[str, float, float, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        OptimizerSpec(*values)


# --- The trainer ---


def test_the_model_of_the_caller_is_not_touched(digits: DataSet) -> None:
    model = _noisy()
    before = copy.deepcopy(model.state_dict())
    trainer = _trainer(model, digits)
    trainer.step()
    Evaluator(model, digits).evaluate(trainer.vector)
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_warming_up_leaves_no_trace(digits: DataSet) -> None:
    spec = OptimizerSpec("sgd", lr=0.1, momentum=0.9)
    cold, warm = _trainer(_noisy(), digits, spec), _trainer(_noisy(), digits, spec)
    random_state = torch.random.get_rng_state()
    losses = []
    for trainer, times in ((cold, 0), (warm, 2)):
        for _ in range(times):
            trainer.warm_up()
        losses.append([trainer.step()[0] for _ in range(3)])
    warm.warm_up()  # and neither in the middle of a run, when there is momentum
    for trainer in (cold, warm):
        trainer.step()
    assert losses[0] == losses[1]
    assert torch.equal(cold.vector, warm.vector)
    assert int(cold.flat.module.state_dict()["1.num_batches_tracked"]) == 4
    assert int(warm.flat.module.state_dict()["1.num_batches_tracked"]) == 4
    assert torch.equal(torch.random.get_rng_state(), random_state)


@pytest.mark.parametrize(
    "spec",
    [SGD, OptimizerSpec("sgd", 0.1, momentum=0.9), OptimizerSpec("adamw", 0.001)],
    ids=["sgd", "momentum", "adamw"],
)
def test_after_divergence_a_state_that_is_finite_again_stays_so(digits: DataSet, spec: OptimizerSpec) -> None:
    trainer = _trainer(build_model("mlp", digits, 0), digits, spec)
    good = trainer.vector.clone()
    trainer.vector[0] = math.nan
    trainer.step()
    assert not torch.isfinite(trainer.vector).all()
    trainer.vector.copy_(good)
    trainer.forget()
    trainer.step()
    assert torch.isfinite(trainer.vector).all()


def test_dropout_does_not_depend_on_who_else_draws_random_numbers(digits: DataSet) -> None:
    alone = _trainer(_noisy(), digits)
    expected = [alone.step()[0] for _ in range(3)]
    trainer, other = _trainer(_noisy(), digits), _trainer(_noisy(), digits, worker=1)
    seen = []
    for _ in range(3):
        other.step()
        torch.rand(1)
        seen.append(trainer.step()[0])
    assert seen == expected


def test_a_batch_too_small_for_batchnorm_is_refused(digits: DataSet) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
    trainer = Trainer(model, digits, torch.tensor([5]), 32, SGD, 0, 0)
    with pytest.raises(UserError, match="batch size 1: the model cannot be trained on it"):
        trainer.warm_up()


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 40), batch_size=st.integers(1, 50), seed=st.integers(0, 2**63 - 1), worker=st.integers(0, 999))
def test_a_pass_takes_every_sample_at_most_once_in_full_batches(
    n: int, batch_size: int, seed: int, worker: int
) -> None:
    images = torch.arange(100, dtype=torch.uint8).view(100, 1, 1, 1)
    part = images, torch.arange(100) % 2
    data = make_dataset("toy", "image", part, part, 2)
    shard = torch.arange(50, 50 + n)
    trainer = Trainer(nn.Linear(1, 2), data, shard, batch_size, SGD, seed, worker)
    full = min(n, batch_size)
    n_batches = n // full
    batches = [trainer.sample_indices(step).tolist() for step in range(2 * n_batches)]
    assert trainer.batch_size == full
    assert all(len(batch) == full for batch in batches)
    for one_pass in (batches[:n_batches], batches[n_batches:]):
        samples = [i for batch in one_pass for i in batch]
        assert len(set(samples)) == len(samples) == n_batches * full
        assert set(samples) <= set(shard.tolist())
    assert trainer.sample_indices(0).tolist() == batches[0]  # the number of the step is all that counts


def test_the_order_depends_on_seed_and_worker_alone(digits: DataSet) -> None:
    def order(model: str, spec: OptimizerSpec, seed: int, worker: int, n_steps: int = 0) -> list[int]:
        trainer = _trainer(build_model(model, digits, n_steps), digits, spec, seed, worker)
        for _ in range(n_steps):
            trainer.step()
        return [i for step in range(50) for i in trainer.sample_indices(step).tolist()]

    one = order("mlp", SGD, 0, 0)
    torch.manual_seed(123)
    assert order("cnn", OptimizerSpec("adamw", lr=1e-3), 0, 0, n_steps=3) == one
    others = [order("mlp", SGD, *which) for which in ((0, 1), (1, 0), (1, 1))]
    assert len({tuple(o) for o in [one, *others]}) == 4
    first_pass, second_pass = one[: 44 * 32], one[44 * 32 :]  # 1438 samples make 44 batches of 32
    assert first_pass[: len(second_pass)] != second_pass


@pytest.mark.parametrize(
    "spec",
    [OptimizerSpec("sgd", 0.05, momentum=0.9), OptimizerSpec("adamw", 0.001)],
    ids=["momentum", "adamw"],
)
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20", "noisy"])
def test_trainers_on_one_model_step_in_turns_as_each_would_alone(
    digits: DataSet, name: str, spec: OptimizerSpec
) -> None:
    def model() -> nn.Module:
        return _noisy() if name == "noisy" else build_model(name, digits, 0)

    alone = [_trainer(model(), digits, spec, worker=rank) for rank in range(3)]
    flat = FlatModel(model())
    shard = torch.arange(len(digits.train_x))
    shared = [Trainer(flat, digits, shard, 32, spec, 0, rank) for rank in range(3)]
    shared[2].warm_up()
    for turn in (0, 1, 1, 2, 0, 2, 1, 0, 2):
        assert shared[turn].step() == alone[turn].step()
        for one, other in zip(shared, alone, strict=True):
            assert torch.equal(one.vector, other.vector)
    shared[1].vector.copy_(shared[0].vector)
    alone[1].vector.copy_(alone[0].vector)
    shared[1].forget()
    alone[1].forget()
    assert shared[1].step() == alone[1].step()
    assert torch.equal(shared[1].vector, alone[1].vector)
    for one, other in zip(shared, alone, strict=True):
        assert len(one._outside) == len(other._outside)
        assert all(torch.equal(a, b) for a, b in zip(one._outside, other._outside, strict=True))


def test_a_step_of_nothing_adds_1_to_the_first_element() -> None:
    data = load(prepare("null", None, download=False))
    model = build_model("null:3", data, 0)
    trainer = trainer_of(data)(model, data, torch.arange(20), 32, SGD, 0, 0)
    assert trainer.step() == (1.0, 20)
    assert trainer.vector.tolist() == [1, 0, 0]
    assert evaluator_of(data)(model, data).evaluate(trainer.vector) == (1.0, 0.0, None)


def test_a_shard_or_a_batch_of_nothing_is_refused(toy: DataSet) -> None:
    model = _linear([[0.0, 0.0], [0.0, 0.0]])
    with pytest.raises(UserError, match="worker 3 has no training samples"):
        Trainer(model, toy, torch.arange(0), 32, SGD, 0, 3)
    with pytest.raises(UserError, match="batch size 0: must be at least 1"):
        Trainer(model, toy, torch.arange(2), 0, SGD, 0, 0)


# --- The evaluator ---


def test_loss_and_accuracy_worked_out_by_hand(toy: DataSet) -> None:
    evaluator = Evaluator(_linear([[0.0, 0.0], [0.0, 0.0]]), toy, batch_size=1)
    # The logits of the right and of the wrong class are 2 and -2, then the other way round.
    right = math.log(1 + math.exp(-4))
    loss, accuracy, worst_class = evaluator.evaluate(torch.tensor([1.0, -1.0, -1.0, 1.0]))
    assert loss == pytest.approx(right, rel=1e-5)
    assert (accuracy, worst_class) == (1, 1)
    loss, accuracy, worst_class = evaluator.evaluate(torch.tensor([-1.0, 1.0, 1.0, -1.0]))
    assert loss == pytest.approx(right + 4, rel=1e-5)
    assert (accuracy, worst_class) == (0, 0)
    # The first class gets 2 from both images and the second nothing: the first image is right, the second wrong.
    mixed = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2))) / 2
    part = torch.tensor([[[[1.0, 1.0]]], [[[1.0, 1.0]]]]), toy.test_y
    lopsided = make_dataset("toy", "image", (toy.train_x, toy.train_y), part, 2)
    evaluator = Evaluator(_linear([[0.0, 0.0], [0.0, 0.0]]), lopsided)
    loss, accuracy, worst_class = evaluator.evaluate(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert loss == pytest.approx(mixed, rel=1e-5)
    assert (accuracy, worst_class) == (0.5, 0)


def test_the_worst_class_is_one_that_the_test_set_has(toy: DataSet) -> None:
    # Of class 0 the model gets two of three right, of class 2 the one; class 1 does not occur.
    part = torch.tensor([[[[1.0, 0.0]]], [[[1.0, 0.0]]], [[[0.0, 1.0]]], [[[0.0, 1.0]]]]), torch.tensor([0, 0, 0, 2])
    three = make_dataset("toy", "image", (toy.train_x, toy.train_y), part, 3)
    model = _linear([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    weights = torch.tensor([1.0, -1.0, 0.0, 0.0, -1.0, 1.0])
    for n in (1, 256):
        tested = Evaluator(model, three, batch_size=n).evaluate(weights)
        assert tested[1:] == pytest.approx((3 / 4, 2 / 3))


def test_the_batch_size_of_the_evaluation_does_not_matter_and_data_stay_as_they_are(toy: DataSet) -> None:
    shifted = make_dataset("toy", "image", (toy.train_x * 3 + 5, toy.train_y), (toy.test_x * 3 + 5, toy.test_y), 2)
    before = shifted.test_x.clone()
    vector = torch.tensor([1.0, -1.0, -1.0, 1.0])
    results = [Evaluator(_linear([[0.0, 0.0], [0.0, 0.0]]), shifted, batch_size=n).evaluate(vector) for n in (1, 256)]
    assert results[0] == pytest.approx(results[1])
    assert results[0][0] == pytest.approx(math.log(1 + math.exp(-4)), rel=1e-5)
    assert torch.equal(shifted.test_x, before)


def test_evaluation_uses_the_statistics_in_the_vector(digits: DataSet) -> None:
    trainer = _trainer(_noisy(), digits)
    trainer.step()
    evaluator = Evaluator(_noisy(), digits)
    first = evaluator.evaluate(trainer.vector)
    assert evaluator.evaluate(trainer.vector) == first
    shifted = trainer.vector.clone()
    shifted[trainer.flat.n_params : trainer.flat.n_params + 4] += 1  # the running means
    assert evaluator.evaluate(shifted) != first


def test_a_state_that_has_not_moved_is_not_measured_again(digits: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(build_model("mlp", digits, 0), digits)
    evaluator = Evaluator(build_model("mlp", digits, 0), digits)
    first = evaluator.evaluate(trainer.vector)
    trainer.step()
    second = evaluator.evaluate(trainer.vector)
    assert second != first
    with monkeypatch.context() as patch:
        patch.setattr(evaluator._flat.module, "forward", None)
        assert evaluator.evaluate(trainer.vector.clone()) == second
    trainer.vector[0] = math.nan
    assert math.isnan(evaluator.evaluate(trainer.vector)[0])
    assert math.isnan(evaluator.evaluate(trainer.vector)[0])


def test_the_accuracy_on_text_counts_characters() -> None:
    x = torch.tensor([[0, 1, 2], [2, 1, 0]], dtype=torch.uint8)
    y = torch.tensor([[0, 1, 2], [2, 0, 1]], dtype=torch.uint8)
    data = make_dataset("toy text", "text", (x, y), (x, y), 3)
    model = nn.Embedding(3, 3)
    loss, accuracy, worst_class = Evaluator(model, data).evaluate(
        torch.eye(3).flatten()
    )  # predicts each character again
    assert accuracy == pytest.approx(4 / 6)
    assert worst_class is None, "a character is no class"
    each = math.log(math.e + 2)
    assert loss == pytest.approx((4 * (each - 1) + 2 * each) / 6)


def test_a_vector_of_another_model_is_refused(toy: DataSet) -> None:
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        Evaluator(_linear([[0.0, 0.0], [0.0, 0.0]]), toy).evaluate(torch.zeros(5))


# --- Real training ---


def test_cnn_learns_digits(digits: DataSet) -> None:
    model = build_model("cnn", digits, 0)
    trainer, evaluator = _trainer(model, digits), Evaluator(model, digits)
    loss_before, *_ = evaluator.evaluate(trainer.vector)
    assert loss_before == pytest.approx(math.log(10), abs=0.1)  # it knows nothing yet
    for _ in range(400):
        trainer.step()
    _, accuracy, _ = evaluator.evaluate(trainer.vector)
    assert accuracy > 0.9


def test_gpt_learns_the_frequencies_of_characters() -> None:
    data = load(prepare("pydoc", None, download=False))
    trainer = _trainer(build_model("gpt", data, 0), data, OptimizerSpec("adamw", lr=3e-3))
    losses = [trainer.step()[0] for _ in range(40)]
    assert losses[0] == pytest.approx(math.log(data.n_classes), abs=0.2)
    assert losses[-1] < 3.2
