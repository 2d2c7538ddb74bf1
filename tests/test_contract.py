"""What every strategy must keep, run over every file of `strategies/`."""

from __future__ import annotations

import dataclasses
import pickle
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cores import InMemory
from hypothesis import given, settings
from hypothesis import strategies as st

import strategies
from sapus_cli import registry
from sapus_cli.strategy import ServerState, fault_of

if TYPE_CHECKING:
    from sapus_cli.strategy import AnyStrategy, Vec

FILES = sorted(path.stem for path in Path(strategies.__file__).parent.glob("*.py") if path.stem != "__init__")
NAMES = sorted(strategies.REGISTRY)
SMALL: dict[str, dict[str, Any]] = {"diloco": {"h": 5, "momentum": 0.5}, "fedbuff": {"k": 2}}
"""Hyper-parameters that make a rule act within a few steps, where its defaults are meant for long runs."""


def make(name: str) -> AnyStrategy:
    return registry.build(name, SMALL.get(name, {}))


def bowl(rank: int, y: Vec) -> Vec:
    """Gradient of |y - c|^2 / 2, whose minimum c differs from worker to worker by a little; the mean of all is 1."""
    return y - 1 - 0.1 * (rank - 1)


def run(strategy: Any, *, steps: int = 60, lr: float = 0.1, x0: float = 5.0, **more: Any) -> InMemory:
    return InMemory(strategy, torch.full((4,), x0), 3, bowl, lr=lr, steps=steps, **more)


def test_every_file_is_registered_under_its_name() -> None:
    assert {name.replace("-", "_") for name in NAMES} == set(FILES)
    for name, where in strategies.REGISTRY.items():
        assert where.startswith(f"strategies.{name.replace('-', '_')}:")


@pytest.mark.parametrize("name", NAMES)
class TestEveryStrategy:
    def test_keeps_the_interface(self, name: str) -> None:
        cls = registry.strategy_class(name)
        assert fault_of(cls) is None
        strategy = make(name)
        assert hash(strategy) == hash(make(name))
        assert pickle.loads(pickle.dumps(strategy)) == strategy  # noqa: S301 - our own
        with pytest.raises(dataclasses.FrozenInstanceError):
            strategy.anything = 1  # type: ignore[attr-defined]

    def test_says_rule_source_and_every_hyper_parameter(self, name: str) -> None:
        cls = registry.strategy_class(name)
        about = registry.describe(cls)
        assert about.summary.endswith(".")
        assert about.rule
        assert about.source
        assert set(about.meanings) == set(registry.hyper_parameters(cls))
        for key, meaning in about.meanings.items():
            assert "Default" in meaning, f"{key} does not say where its default comes from"

    def test_descends_a_bowl(self, name: str) -> None:
        done = run(make(name)).run()
        assert (done.x - 1).abs().max() < 1.0, f"from 5 to {done.x}"

    def test_every_step_is_reported_once(self, name: str) -> None:
        done = run(make(name), steps=23).run()
        assert done.server.steps == 3 * 23 == sum(row.n_steps for row in done.rows)

    def test_the_same_order_of_events_gives_the_same_bits(self, name: str) -> None:
        ends = [run(make(name), steps=15).run(random.Random(4).choice).x for _ in range(2)]  # noqa: S311 - no secret
        assert torch.equal(*ends)

    def test_keeps_no_vector_longer_than_until_the_reply(self, name: str) -> None:
        own, shared = (
            run(make(name), steps=20, shared=shared).run(random.Random(4).choice).x  # noqa: S311 - no secret
            for shared in (False, True)
        )
        assert torch.equal(own, shared)

    @pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
    def test_descends_over_a_narrow_wire(self, name: str, wire: torch.dtype) -> None:
        done = run(make(name), wire=wire).run()
        assert (done.x - 1).abs().max() < 1.0, f"from 5 to {done.x}"
        assert done.server.declined == 0

    def test_touches_no_global_random_state(self, name: str) -> None:
        torch.manual_seed(5)
        random.seed(5)
        before = (torch.get_rng_state().clone(), random.getstate())
        run(make(name), steps=10).run()
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()

    def test_two_runs_with_one_object_do_not_share_state(self, name: str) -> None:
        strategy = make(name)
        first = run(strategy, steps=12).run().x.clone()
        assert torch.equal(first, run(strategy, steps=12).run().x)

    def test_one_worker_alone_is_no_special_case(self, name: str) -> None:
        done = InMemory(make(name), torch.full((4,), 5.0), 1, bowl, lr=0.1, steps=60).run()
        assert (done.x - 0.9).abs().max() < 1.0

    def test_x0_is_where_the_server_begins(self, name: str) -> None:
        state = make(name).init_server(torch.full((4,), 5.0), 3)
        assert isinstance(state, ServerState)
        assert torch.equal(state.x, torch.full((4,), 5.0))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 25))
def test_any_order_of_events_comes_to_an_end(name: str, order: random.Random, n: int, steps: int) -> None:
    done = InMemory(make(name), torch.full((2,), 3.0), n, bowl, lr=0.1, steps=steps).run(order.choice)
    assert torch.isfinite(done.x).all()
    assert done.server.steps == n * steps
