"""The update rules of the strategies, on numbers worked out by hand, and the contract under any sequence of events."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from harness import Cluster, Pushed, quadratic, vec
from hypothesis import given, settings
from hypothesis import strategies as st

from sapus_cli.strategy import fault_of
from strategies.adacomm import AdaComm
from strategies.adpsgd import AdpSgd
from strategies.asp import Asp
from strategies.bsp import Bsp
from strategies.dc_asgd import DcAsgd
from strategies.diloco import DiLoCo
from strategies.dssp import Dssp
from strategies.easgd import Easgd
from strategies.fedasync import FedAsync
from strategies.fedbuff import FedBuff
from strategies.lag import Lag
from strategies.local_sgd import LocalSgd
from strategies.local_sgd_async import LocalSgdAsync
from strategies.post_local_sgd import PostLocalSgd
from strategies.sapus import Sapus
from strategies.sapus_weighted import SapusWeighted
from strategies.selsync import SelSync
from strategies.ssp import Ssp

if TYPE_CHECKING:
    from sapus_cli.strategy import Strategy, Vec

ALL: list[Strategy[Any, Any]] = [
    AdaComm(h0=3, t0_s=5.0),
    AdpSgd(h0=2, warmup=2),
    Asp(),
    Bsp(),
    DcAsgd(),
    DcAsgd(lam=1.0, variant="constant", scale="sum"),
    DiLoCo(h=2),
    Dssp(s_low=1, r_max=2),
    Easgd(h=2),
    FedAsync(h=2),
    FedBuff(k=3, h=2),
    Lag(d=2, h_max=3),
    LocalSgd(h=2),
    LocalSgdAsync(h=2),
    PostLocalSgd(h=2, t0=3),
    Sapus(),
    SapusWeighted(overlap=False),
    SelSync(window=2, h_max=3),
    Ssp(s=1),
]
BARRIER = (AdaComm, AdpSgd, Bsp, DiLoCo, LocalSgd, PostLocalSgd)


def name(strategy: Strategy[Any, Any]) -> str:
    return type(strategy).__name__


def by_rank(*updates: float) -> Any:
    """Every step of worker i moves it by the i-th number."""
    return lambda rank, params, _t: torch.full_like(params, updates[rank])


def noisy(lr: float = 0.2) -> Any:
    """Plain SGD on |x|^2/2 whose gradient noise depends on the rank and the step alone."""

    def move(rank: int, params: Vec, t: int) -> Vec:
        noise = torch.sin(torch.arange(1.0, params.numel() + 1) * (3 * rank + 7 * t))
        return (params + 0.5 * noise) * -lr

    return move


def trajectory(strategy: Strategy[Any, Any], steps: int = 12) -> list[Vec]:
    """The global state after each round robin of three workers."""
    cluster = Cluster(strategy, 3, noisy(), x0=vec(1.0, -2.0, 0.5, 3.0))
    states = []
    for _ in range(steps):
        for rank in range(3):
            if rank not in cluster.waiting:
                cluster.step(rank)
        states.append(cluster.x.clone())
    return states


def same(a: list[Vec], b: list[Vec]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def sent(pushed: Pushed | None) -> Pushed:
    assert pushed is not None
    return pushed


# Every strategy


@pytest.mark.parametrize("strategy", ALL, ids=name)
def test_class_is_a_strategy(strategy: Strategy[Any, Any]) -> None:
    assert fault_of(type(strategy)) is None
    assert type(strategy)() == type(strategy)(), "the defaults are out of range, or two of the same differ"


@pytest.mark.parametrize("strategy", ALL, ids=name)
def test_global_state_is_updated_in_place(strategy: Strategy[Any, Any]) -> None:
    cluster = Cluster(strategy, 2, noisy())
    where = cluster.x.data_ptr()
    cluster.run(9)
    assert cluster.x.data_ptr() == where
    assert not torch.equal(cluster.x, cluster.x0)


@pytest.mark.parametrize("strategy", ALL, ids=name)
def test_descends_a_quadratic_and_ends_at_its_minimum(strategy: Strategy[Any, Any]) -> None:
    cluster = Cluster(strategy, 3, quadratic(lr=0.1, target=2.0), x0=vec(6.0, -1.0))
    cluster.run(300)
    torch.testing.assert_close(cluster.x, vec(2.0, 2.0), atol=1e-3, rtol=0)
    assert cluster.server.pending == 0


@pytest.mark.parametrize("strategy", ALL, ids=name)
def test_no_local_step_is_left_behind(strategy: Strategy[Any, Any]) -> None:
    cluster = Cluster(strategy, 3, quadratic(lr=0.1)).run(41)
    taken = {rank: sum(p.received.n_steps for p in cluster.pushes if p.received.worker == rank) for rank in range(3)}
    assert taken == {0: 41, 1: 41, 2: 41}


@pytest.mark.parametrize(
    ("strategy", "after_one_push"),
    [
        # Minimum 0, curvature 1, lr 0.5, two workers, x = 8: a step is -4, two steps -6.
        (Asp(), 6.0),
        (Asp(scale="sum"), 4.0),
        (Ssp(), 6.0),
        (Dssp(), 6.0),
        (DcAsgd(), 6.0),
        (SelSync(), 6.0),
        (Lag(), 6.0),
        (LocalSgdAsync(h=2), 5.0),
        (FedBuff(k=1, server_lr=0.5, h=2), 5.0),
        # The worker stands at 2: 8 + 0.25 (2 - 8) with beta 0.5, and 0.6 * 2 + 0.4 * 8.
        (Easgd(beta=0.5, h=2), 6.5),
        (FedAsync(h=2), 4.4),
    ],
    ids=lambda value: f"{value:g}" if isinstance(value, float) else name(value),
)
def test_sign_and_size_of_a_push_without_barrier(strategy: Strategy[Any, Any], after_one_push: float) -> None:
    cluster = Cluster(strategy, 2, quadratic(lr=0.5), x0=vec(8.0))
    while not cluster.pushes:
        cluster.step(0)
    assert float(cluster.x[0]) == pytest.approx(after_one_push, abs=1e-6)


@pytest.mark.parametrize(
    ("strategy", "after_one_round"),
    [
        (Bsp(), 4.0),
        (LocalSgd(h=2), 2.0),
        (PostLocalSgd(h=2, t0=0), 2.0),
        (PostLocalSgd(h=2, t0=1), 4.0),
        (AdaComm(h0=2), 2.0),
        (AdpSgd(h0=2), 2.0),
        # The momentum is u = -6, so x moves by 0.5 (-6 + 0.5 * -6) from 8.
        (DiLoCo(h=2, outer_lr=0.5, momentum=0.5), 3.5),
    ],
    ids=lambda value: f"{value:g}" if isinstance(value, float) else name(value),
)
def test_sign_and_size_of_a_round(strategy: Strategy[Any, Any], after_one_round: float) -> None:
    cluster = Cluster(strategy, 2, quadratic(lr=0.5), x0=vec(8.0))
    while not any(pushed.reply for pushed in cluster.pushes):
        for rank in (0, 1):
            if rank not in cluster.waiting:
                cluster.step(rank)
    assert float(cluster.x[0]) == after_one_round
    assert cluster.locals() == {0: after_one_round, 1: after_one_round}


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (AdaComm, {"h0": 0}),
        (AdaComm, {"t0_s": 0.0}),
        (AdaComm, {"gamma": 1.1}),
        (AdaComm, {"gamma": -0.1}),
        (AdpSgd, {"h0": 0}),
        (AdpSgd, {"warmup": 0}),
        (AdpSgd, {"low": 1.1}),
        (AdpSgd, {"high": 0.9}),
        (DcAsgd, {"lam": -0.1}),
        (DcAsgd, {"m": 1.5}),
        (DiLoCo, {"h": 0}),
        (DiLoCo, {"outer_lr": 0.0}),
        (DiLoCo, {"momentum": 1.1}),
        (Dssp, {"s_low": -1}),
        (Dssp, {"r_max": -1}),
        (Easgd, {"beta": 0.0}),
        (Easgd, {"beta": 1.1}),
        (Easgd, {"h": 0}),
        (FedAsync, {"h": 0}),
        (FedAsync, {"mixing": 0.0}),
        (FedAsync, {"mixing": 1.1}),
        (FedAsync, {"exponent": -1.0}),
        (FedAsync, {"slope": 0.0}),
        (FedAsync, {"start": -1}),
        (FedBuff, {"k": 0}),
        (FedBuff, {"server_lr": math.nan}),
        (FedBuff, {"h": 0}),
        (Lag, {"xi": -0.1}),
        (Lag, {"d": 0}),
        (Lag, {"h_max": 0}),
        (LocalSgdAsync, {"h": 0}),
        (PostLocalSgd, {"h": 0}),
        (PostLocalSgd, {"t0": -1}),
        (SelSync, {"delta": -0.1}),
        (SelSync, {"smoothing": 0.0}),
        (SelSync, {"window": 0}),
        (SelSync, {"h_max": 0}),
        (Ssp, {"s": -1}),
        (Ssp, {"s": 1.5}),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else value.__name__,
)
def test_hyper_parameter_out_of_range_is_refused(cls: Any, values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(values))} = .*must"):
        cls(**values)


# Identities between strategies


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (DcAsgd(lam=0.0), Asp()),
        (DcAsgd(lam=0.0, variant="constant", scale="sum"), Asp(scale="sum")),
        (LocalSgdAsync(h=1), Asp()),
        (SelSync(delta=0.0), Asp()),
        (SelSync(h_max=1), Asp()),
        (Lag(xi=0.0), Asp()),
        (Ssp(s=100), Asp()),
        (Dssp(s_low=100), Asp()),
        (Dssp(s_low=2, r_max=0), Ssp(s=2)),
        (LocalSgd(h=1), Bsp()),
        (DiLoCo(h=3, outer_lr=1.0, momentum=0.0), LocalSgd(h=3)),
        (PostLocalSgd(h=3, t0=0), LocalSgd(h=3)),
        (PostLocalSgd(h=3, t0=100), Bsp()),
        (AdaComm(h0=3), LocalSgd(h=3)),
        (AdpSgd(h0=3), LocalSgd(h=3)),
    ],
    ids=name,
)
def test_same_states_bit_by_bit(one: Strategy[Any, Any], other: Strategy[Any, Any]) -> None:
    assert same(trajectory(one), trajectory(other))


def test_dc_asgd_with_compensation_is_not_asp() -> None:
    assert not same(trajectory(DcAsgd()), trajectory(Asp()))


# ssp, dssp


def clocks(cluster: Cluster) -> dict[int, int]:
    server: Any = cluster.server
    return dict(server.clock)


def test_ssp_without_slack_keeps_all_clocks_equal() -> None:
    cluster = Cluster(Ssp(s=0), 3, quadratic(lr=0.1))
    for _ in range(5):
        for rank in (2, 0, 1):
            assert len(set(clocks(cluster).values())) == 1 or rank not in cluster.waiting
            cluster.step(rank)
        assert set(clocks(cluster).values()) == {clocks(cluster)[0]}
        assert not cluster.waiting


def test_ssp_blocks_beyond_its_slack_and_lets_go_when_the_slowest_moves() -> None:
    cluster = Cluster(Ssp(s=2), 2, by_rank(1.0, 1.0))
    for _ in range(3):
        assert 0 not in cluster.waiting
        cluster.step(0)
    assert set(cluster.waiting) == {0}
    assert float(cluster.x[0]) == 2.5  # 1 + 3/2: a push is applied even while its reply is withheld
    cluster.step(1)
    assert not cluster.waiting
    assert cluster.locals()[0] == 3.0


def test_ssp_lets_go_when_the_slowest_leaves_and_starts_newcomers_at_the_lowest_clock() -> None:
    cluster = Cluster(Ssp(s=1), 3, by_rank(1.0, 1.0, 1.0))
    cluster.step(0)
    cluster.step(0)
    cluster.step(1)
    assert set(cluster.waiting) == {0}
    cluster.leave(2)
    assert not cluster.waiting
    cluster.join(2)
    assert clocks(cluster) == {0: 2, 1: 1, 2: 1}


def lead_of_fast(strategy: Dssp, *, fast_s: float, slow_s: float) -> int:
    """How far worker 0 gets ahead after worker 1 has pushed twice, at times 0 and slow_s."""
    cluster = Cluster(strategy, 2, by_rank(1.0, 1.0), step_s={0: fast_s, 1: slow_s})
    cluster.step(0)
    cluster.step(1)
    cluster.now = slow_s
    cluster.step(1)
    while 0 not in cluster.waiting:
        cluster.now += fast_s
        cluster.step(0)
    return clocks(cluster)[0] - clocks(cluster)[1]


def test_dssp_runs_ahead_to_just_before_the_next_push_of_the_slowest() -> None:
    # Worker 1 pushed at 10 and is due at 20. Worker 0, at clock 1, makes its clock 3 at 14 and leads by 1, s_low. At 16
    # it leads by 2 and is granted r: it would stop at 16 + 2r and wait 4 - 2r, so r = 2, and it stops with a lead of 4.
    cluster_lead = lead_of_fast(Dssp(s_low=1, r_max=5), fast_s=2.0, slow_s=10.0)
    assert cluster_lead == 4


def test_dssp_takes_the_fewest_steps_of_equal_waits() -> None:
    # Stops at 11, 12, ... with a worker 1 due at every whole second: no wait anywhere, so no extra step.
    assert lead_of_fast(Dssp(s_low=1, r_max=5), fast_s=1.0, slow_s=1.0) == 2


@pytest.mark.parametrize("r_max", [0, 1, 4])
def test_dssp_never_exceeds_its_upper_bound(r_max: int) -> None:
    # A cycle of 1000 s against 1 s: running on always looks better, and only the bound stops it.
    assert lead_of_fast(Dssp(s_low=2, r_max=r_max), fast_s=1.0, slow_s=1000.0) == 2 + r_max + 1


def test_dssp_says_how_many_steps_it_granted() -> None:
    cluster = Cluster(Dssp(s_low=0, r_max=3), 2, by_rank(1.0, 1.0), step_s={0: 1.0, 1: 100.0})
    cluster.step(1)
    cluster.step(0)
    assert sent(cluster.step(0)).info == {"weight": 0.5, "extra_steps": 3}
    assert sent(cluster.step(0)).info == {"weight": 0.5, "extra_steps": 2}


def test_dssp_without_a_measured_cycle_is_ssp() -> None:
    cluster = Cluster(Dssp(s_low=1, r_max=9), 2, by_rank(1.0, 1.0))
    cluster.step(0)
    cluster.step(0)
    assert set(cluster.waiting) == {0}


# The intervals of post-local-sgd, adacomm, adpsgd


def intervals(cluster: Cluster, worker: int = 0) -> list[int]:
    return [p.received.n_steps for p in cluster.pushes if p.received.worker == worker]


def test_post_local_sgd_switches_after_t0_steps_and_flushes_the_tail() -> None:
    assert intervals(Cluster(PostLocalSgd(h=4, t0=3), 2, noisy()).run(13)) == [1, 1, 1, 4, 4, 2]


def test_adacomm_follows_the_square_root_of_the_loss() -> None:
    # A step a second, T0 = 8: decisions with the rounds that end at 8, 16, 24, 32. The losses there are 1, 1, 1/4, 1/4
    # of the first. From H0 = 8: not smaller, so 4; not smaller than 4, so 2; 8 sqrt(1/4) = 4 is not either, so 1; 1.
    cluster = Cluster(AdaComm(h0=8, t0_s=8.0), 2, noisy(), loss=lambda _rank, t: 4.0 if t <= 16 else 1.0)
    for _ in range(40):
        cluster.now += 1
        for rank in (0, 1):
            cluster.step(rank)
    assert intervals(cluster) == [8] + [4] * 2 + [2] * 4 + [1] * 16


@pytest.mark.parametrize(
    ("h", "ratio", "expected"),
    [
        (16, 0.25, 8),
        (16, 0.26, 9),
        (16, 1e-9, 1),
        (16, 0.0, 1),
        (16, 1.0, 8),
        (16, 4.0, 8),
        (5, 0.25, 2),
        (1, 4.0, 1),
        (16, math.nan, 8),
        (16, math.inf, 8),
        (16, -1.0, 8),
    ],
)
def test_adacomm_next_interval(h: int, ratio: float, expected: int) -> None:
    assert AdaComm(h0=16).next_interval(h, ratio) == expected


@given(ratios=st.lists(st.floats(allow_nan=True), max_size=20), gamma=st.floats(0, 1))
def test_adacomm_never_grows(ratios: list[float], gamma: float) -> None:
    strategy = AdaComm(h0=40, gamma=gamma)
    h = strategy.h0
    for ratio in ratios:
        shorter = strategy.next_interval(h, ratio)
        assert 1 <= shorter <= h
        h = shorter


def test_adacomm_decides_once_in_a_block_of_time() -> None:
    cluster = Cluster(AdaComm(h0=8, t0_s=100.0), 1, noisy())
    cluster.now = 350.0
    for _ in range(8 + 4 + 4):
        cluster.step(0)
    cluster.now = 399.0
    for _ in range(4):
        cluster.step(0)
    cluster.now = 400.0
    for _ in range(4 + 2):
        cluster.step(0)
    assert intervals(cluster) == [8, 4, 4, 4, 4, 2]


def test_adpsgd_variance_is_that_of_the_states() -> None:
    cluster = Cluster(AdpSgd(h0=1), 3, by_rank(1.0, 2.0, 6.0))
    for rank in range(3):
        cluster.step(rank)
    # Mean 3, squares of the distances 4, 1, 9.
    assert cluster.pushes[0].info["variance"] == pytest.approx(14 / 3)
    assert cluster.pushes[0].info["target"] == pytest.approx(14 / 3)
    assert cluster.locals() == {0: 4.0, 1: 4.0, 2: 4.0}


def test_adpsgd_lengthens_on_small_variance_and_shortens_on_large() -> None:
    spread = iter([4.0, 4.0, 1.0, 1.0, 1.0, 10.0, 10.0, 10.0])
    now = {"spread": 0.0}

    def move(rank: int, params: Vec, _t: int) -> Vec:
        return torch.full_like(params, now["spread"] if rank else 0.0)

    cluster = Cluster(AdpSgd(h0=2, warmup=2), 2, move)
    for total in spread:
        server: Any = cluster.server
        now["spread"] = total / server.h
        for _ in range(server.h):
            cluster.step(0)
            cluster.step(1)
    # Variance (total/2)^2: 4 and 4 set the target; 0.25 is below 2.8, thrice; 25 is above 5.2, thrice.
    assert intervals(cluster) == [2, 2, 2, 3, 4, 5, 4, 3]


def test_adpsgd_with_one_worker_keeps_its_interval() -> None:
    assert set(intervals(Cluster(AdpSgd(h0=3, warmup=1), 1, noisy()).run(60))) == {3}


# easgd


def test_easgd_draws_both_states_together() -> None:
    cluster = Cluster(Easgd(beta=0.5, h=1), 2, by_rank(8.0, 0.0), x0=vec(0.0))
    pushed = sent(cluster.step(0))
    # alpha 0.25, w = 8, x = 0: e = 2.
    assert float(cluster.x[0]) == 2.0
    assert cluster.locals()[0] == 6.0
    assert pushed.info == {"weight": 0.25}
    cluster.step(0)
    # w = 14, x = 2: e = 3; the mixing rate is what it was.
    assert float(cluster.x[0]) == 5.0
    assert cluster.locals()[0] == 11.0


@given(order=st.lists(st.integers(0, 3), max_size=30), beta=st.floats(0.05, 1.0))
def test_easgd_conserves_the_sum_of_all_states(order: list[int], beta: float) -> None:
    cluster = Cluster(Easgd(beta=beta, h=1), 4, lambda _rank, params, _t: torch.zeros_like(params), x0=vec(1.0, -3.0))
    for rank, w in cluster.workers.items():
        w.local.add_(vec(rank, -2.0 * rank))
    total = cluster.x + sum(w.local for w in cluster.workers.values())
    for rank in order:
        cluster.step(rank)
        after = cluster.x + sum(w.local for w in cluster.workers.values())
        torch.testing.assert_close(after, total, atol=1e-5, rtol=0)


def test_easgd_last_push_is_a_state_even_between_two_exchanges() -> None:
    cluster = Cluster(Easgd(beta=0.5, h=10), 1, by_rank(1.0), x0=vec(100.0))
    cluster.step(0)
    cluster.step(0, last=True)
    assert float(cluster.x[0]) == 101.0  # 100 + 0.5 (102 - 100)


# diloco, fedasync, fedbuff


def test_diloco_momentum_is_nesterov() -> None:
    cluster = Cluster(DiLoCo(h=1, outer_lr=0.5, momentum=0.5), 2, by_rank(-3.0, -5.0), x0=vec(0.0))
    reference = torch.nn.Parameter(vec(0.0))
    optimizer = torch.optim.SGD([reference], lr=0.5, momentum=0.5, nesterov=True)
    for expected in (-3.0, -6.5, -10.25):
        cluster.step(0)
        cluster.step(1)
        # u = -4; m = -4, -6, -7; x moves by 0.5 (u + 0.5 m).
        assert float(cluster.x[0]) == expected
        reference.grad = vec(4.0)
        optimizer.step()
        assert float(reference.detach()[0]) == expected


def test_fedasync_mixing_rate_depends_on_staleness_alone() -> None:
    cluster = Cluster(FedAsync(h=1, mixing=0.5), 2, by_rank(0.0, 0.0))
    for _ in range(50):
        assert sent(cluster.step(0)).info["weight"] == 0.5
    cluster.step(1)
    cluster.step(0)
    cluster.step(0)
    cluster.step(0)
    assert sent(cluster.step(1)).info["weight"] == 0.25  # 0.5 (1 + 3)^-0.5
    assert sent(cluster.step(1)).info["weight"] == 0.5


@pytest.mark.parametrize(
    ("strategy", "staleness", "expected"),
    [
        (FedAsync(), 0, 1.0),
        (FedAsync(), 3, 0.5),
        (FedAsync(exponent=1.0), 4, 0.2),
        (FedAsync(decay="hinge"), 4, 1.0),
        (FedAsync(decay="hinge"), 5, 1 / 11),
        (FedAsync(decay="hinge", slope=1.0, start=0), 3, 0.25),
        (FedAsync(decay="constant"), 1000, 1.0),
    ],
)
def test_fedasync_freshness(strategy: FedAsync, staleness: int, expected: float) -> None:
    assert strategy.freshness(staleness) == pytest.approx(expected)


def test_fedasync_last_push_is_a_state_even_between_two_exchanges() -> None:
    cluster = Cluster(FedAsync(h=10, mixing=0.5), 1, by_rank(1.0), x0=vec(100.0))
    cluster.step(0)
    cluster.step(0, last=True)
    assert float(cluster.x[0]) == 101.0


def test_fedbuff_applies_every_kth_push_and_answers_each() -> None:
    cluster = Cluster(FedBuff(k=3, server_lr=0.5, h=1), 2, by_rank(1.0, 4.0), x0=vec(0.0))
    cluster.step(0)
    cluster.step(1)
    assert not cluster.waiting
    assert float(cluster.x[0]) == 0.0
    assert (cluster.server.pending, cluster.version) == (2, 0)
    cluster.step(0)
    assert float(cluster.x[0]) == 1.0  # 0.5 (1 + 4 + 1)/3
    assert (cluster.server.pending, cluster.version) == (0, 3)
    # Worker 1 pulled before that one update: s = 1/sqrt(2).
    assert sent(cluster.step(1)).info["weight"] == pytest.approx(0.5 / 3 / math.sqrt(2))
    assert sent(cluster.step(0)).info["weight"] == pytest.approx(0.5 / 3)


def test_fedbuff_applies_the_rest_when_the_last_worker_leaves() -> None:
    cluster = Cluster(FedBuff(k=10, server_lr=0.5, h=1), 2, by_rank(1.0, 3.0), x0=vec(0.0)).run(1)
    assert float(cluster.x[0]) == pytest.approx(0.2)  # 0.5 (1 + 3)/10


# dc-asgd


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # Worker 1 pulled 4; worker 0 moved x to 3.5 since (u = -1, weight 1/2). u = 0.5 of worker 1 becomes
        # u - lam u^2 (3.5 - 4) = 0.5 + 0.5 * 0.25 * 0.5.
        (DcAsgd(lam=0.5, variant="constant"), 3.5 + 0.5 * 0.5625),
        # Limited to the size of the update: 0.5 + 100 * ... becomes 0.5 + 0.5.
        (DcAsgd(lam=100.0, variant="constant"), 3.5 + 0.5 * 1.0),
        # ms = 0.5 (0.5 * 1) + 0.5 * 0.25 = 0.375 after the second push; 0.5 + 0.5 * 0.25 * 0.5 / sqrt(0.375).
        (DcAsgd(lam=0.5, m=0.5), 3.5 + 0.5 * (0.5 + 0.0625 / math.sqrt(0.375))),
    ],
    ids=["constant", "limited", "adaptive"],
)
def test_dc_asgd_by_hand(strategy: DcAsgd, expected: float) -> None:
    cluster = Cluster(strategy, 2, by_rank(-1.0, 0.5), x0=vec(4.0))
    cluster.step(0)
    cluster.step(1)
    assert float(cluster.x[0]) == pytest.approx(expected, abs=1e-6)
    assert cluster.locals()[1] == pytest.approx(expected, abs=1e-6)


def test_dc_asgd_comes_closer_to_the_gradient_at_the_new_state() -> None:
    # f = x^4/4, lr 0.1, x_i = 1, x = 0.9: the stale gradient is 1, the one at x is 0.729. Constant form at
    # lambda = 1, lam = lambda/lr = 10: g = 1 + 1 * 1 * (0.9 - 1) = 0.9.
    cluster = Cluster(DcAsgd(lam=10.0, variant="constant", scale="sum"), 2, lambda _rank, x, _t: -0.1 * x**3)
    cluster.step(0)
    assert float(cluster.x[0]) == pytest.approx(0.9)
    cluster.step(1)
    assert float(cluster.x[0]) == pytest.approx(0.9 - 0.1 * 0.9, abs=1e-6)


def test_dc_asgd_does_not_touch_a_fresh_update() -> None:
    cluster = Cluster(DcAsgd(lam=1000.0), 1, by_rank(2.0), x0=vec(0.0))
    for expected in (2.0, 4.0, 6.0):
        cluster.step(0)
        assert float(cluster.x[0]) == expected


# selsync, lag


def by_step(*updates: float) -> Any:
    """The t-th step moves by the t-th number."""
    return lambda _rank, params, t: torch.full_like(params, updates[t - 1])


def test_selsync_pushes_when_the_smoothed_norm_jumps() -> None:
    # smoothing 0.5: E = 1, 1 | 1, then 0.5 (1 + 9) = 5: change 4; then 0.5 (5 + 9) = 7: 0.4; then 8: 1/7.
    cluster = Cluster(SelSync(delta=0.3, smoothing=0.5, window=2), 1, by_step(1.0, -1.0, 1.0, 3.0, 3.0, 3.0))
    results = [cluster.step(0) for _ in range(6)]
    reasons = [pushed and (pushed.info["reason"], pushed.info.get("change")) for pushed in results]
    expected = [("warm-up", None), ("warm-up", None), None, ("change", 4.0), ("change", pytest.approx(0.4)), None]
    assert reasons == expected
    assert intervals(cluster) == [1, 1, 2, 1]


def test_selsync_measures_steps_not_the_jump_of_a_pull() -> None:
    # Worker 1 moves x by 50 a push; worker 0 always steps by 1 and must see no change of that.
    cluster = Cluster(SelSync(window=1, h_max=2), 2, by_rank(1.0, 100.0))
    for _ in range(9):
        cluster.step(0)
        cluster.step(1)
    assert {p.info["reason"] for p in cluster.pushes if p.received.worker == 0} == {"warm-up", "h_max"}
    assert intervals(cluster) == [1, 2, 2, 2, 2]


def test_selsync_pushes_on_a_step_that_is_no_number() -> None:
    cluster = Cluster(SelSync(window=1), 1, by_step(1.0, 1.0, math.nan))
    assert cluster.step(0) is not None
    assert cluster.step(0) is None
    assert cluster.step(0) is not None


def test_lag_pushes_when_a_step_differs_enough_from_the_one_sent() -> None:
    # xi 1, D 1, one worker, so a move of x is the push itself. Step 1: |1 - 0|^2 >= 0, push; dx^2 = 1.
    # Step 1.5: 0.25 < 1, stays. Step 2.5: 2.25 >= 1, push of 4 in 2 steps: dx^2 = (4/2)^2 = 4. Step 4: 2.25 < 4.
    cluster = Cluster(Lag(xi=1.0, d=1), 1, by_step(1.0, 1.5, 2.5, 4.0))
    results = [cluster.step(0) for _ in range(4)]
    facts = [pushed and (pushed.info["change"], pushed.info["bound"]) for pushed in results]
    assert facts == [(1.0, 0.0), None, (2.25, 1.0), None]
    assert intervals(cluster) == [1, 2]
    assert float(cluster.x[0]) == 6.0


def test_lag_sums_the_last_d_moves() -> None:
    # Moves 1, 4, 9 with D = 2 and xi 0.5: bounds 0, 0.5, 2.5, 6.5.
    cluster = Cluster(Lag(xi=0.5, d=2), 1, by_step(1.0, 2.0, 3.0, 9.0))
    bounds = [sent(cluster.step(0)).info["bound"] if t != 2 else cluster.step(0) for t in range(3)]
    assert bounds == [0.0, 0.5, None]
    assert sent(cluster.step(0)).info["bound"] == 2.5


def test_lag_pushes_in_any_case_after_h_max_steps() -> None:
    cluster = Cluster(Lag(xi=1.0, d=1, h_max=3), 1, by_rank(1.0))
    reasons = [pushed and pushed.info["reason"] for pushed in (cluster.step(0) for _ in range(7))]
    assert reasons == ["change", None, None, "h_max", None, None, "h_max"]


# Any sequence of events


EVENTS = st.lists(
    st.tuples(st.sampled_from(["step"] * 5 + ["leave", "join"]), st.integers(0, 5), st.floats(0, 9)),
    max_size=60,
)


@pytest.mark.parametrize("strategy", ALL, ids=name)
@settings(max_examples=150, deadline=None)
@given(n_workers=st.integers(1, 4), events=EVENTS, seed=st.integers(0, 99))
def test_no_sequence_of_events_blocks_all_or_breaks_the_contract(
    strategy: Strategy[Any, Any], n_workers: int, events: list[tuple[str, int, float]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    cluster = Cluster(strategy, n_workers, lambda _rank, params, _t: torch.randn(params.shape, generator=generator))
    for kind, number, seconds in events:
        rank = number % n_workers
        cluster.now += seconds
        live = rank in cluster.workers
        if kind == "join" and not live:
            cluster.join(rank)
        elif kind == "leave" and live:
            cluster.leave(rank)
        elif kind == "step" and live and rank not in cluster.waiting:
            cluster.step(rank)
        assert not cluster.workers or len(cluster.waiting) < len(cluster.workers), "all live workers wait"
        assert bool(torch.isfinite(cluster.x).all())


@pytest.mark.parametrize("strategy", [s for s in ALL if isinstance(s, BARRIER)], ids=name)
def test_worker_comes_back_in_the_round_in_which_it_died(strategy: Strategy[Any, Any]) -> None:
    cluster = Cluster(strategy, 2, by_rank(1.0, 1.0))
    while 1 not in cluster.waiting:
        cluster.step(1)
    cluster.leave(1)
    cluster.join(1)
    while 0 not in cluster.waiting:
        cluster.step(0)
    assert 1 not in cluster.waiting
