"""SaPus with pushes weighed by a window of every worker's most recent loss."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from sapus_cli.strategy import Push, Received, Reply, Step, Strategy, Vec, require_between
from strategies import sapus
from strategies.sapus import Measured, Watch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FLOOR = 1e-12
"""Least variance of a mean loss, so that equal losses differ by nothing rather than by nothing over nothing."""
SMOOTHING = 0.2
PAST = 4

Losses = dict[int, tuple[float, float]]
"""Worker -> its latest mean loss and the variance of that mean."""


@dataclass
class Seen:
    """What the server remembers of one worker.

    `z` is how much the others had improved between its last pull and its last push, in standard deviations;
    `at_pull` the window at its last pull.
    """

    pushed_s: float
    n_steps: int
    interval_s: float = 0.0
    staleness: int = 0
    z: float = 0.0
    at_pull: Losses = field(default_factory=dict)


@dataclass
class Window(Measured):
    """Server state: the most recent loss of every live worker, and how the window stood at the latest 4 N pushes."""

    losses: Losses = field(default_factory=dict)
    seen: dict[int, Seen] = field(default_factory=dict)
    past: deque[Losses] = field(default_factory=deque)
    pushes: int = 0


@dataclass(frozen=True)
class SapusWeighted(Strategy[Watch, Window]):
    """SaPus, weighted: as sapus, and while the global loss falls, fresh pushes take over what delayed workers leave.

    Rule: push as sapus; x <- x + w_i u_i,
        w_i = min(1, max(1/N, 1.5/(1 + tau)), (1/N) (1 + phi s_i max(0, N/N_eff - 1))), where phi says how surely the
        window's losses fall, s_i how fresh the push is, N_eff how many workers contribute, tau the median staleness.
    Source: the global-loss window is that of the abstract of Zhang and Wang, IEEE TPDS 33(7), 2022; the formulas are
        this project's construction (docs/algorithm.md), not quoted from the paper.

    Hyper-parameters:
        rho: as for sapus, in (0, 1]. Default 0.9: ours.
        horizon: as for sapus, above 0. Default 40: ours.
        overlap: as for sapus. Default true: ours.
        sample: as for sapus, at least 64. Default 16384: ours.
        lr_curvature: as for sapus, at least 0. Default 0: not known.
        without: as for sapus. Default "nothing": ours.
        weighting: "window" is the rule above; "loss-share" the plain share w_i = (1/N) r_i / mean r, r = loss^-power,
            kept as an ablation: on label-sorted shards one worker can take all the weight. Default "window": ours.
        power: exponent of the loss in "loss-share", at least 0. Default 1: ours.
    """

    columns: ClassVar[tuple[str, ...]] = (*sapus.COLUMNS, "own_loss", "n_eff", "phi", "freshness")

    rho: float = 0.9
    horizon: float = 40.0
    overlap: bool = True
    sample: int = 16_384
    lr_curvature: float = 0.0
    without: sapus.Part = "nothing"
    weighting: Literal["window", "loss-share"] = "window"
    power: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        sapus.check(self.rho, self.horizon, self.sample, self.lr_curvature)
        require_between("power", self.power, 0.0)

    def init_worker(self, x0: Vec, worker: int) -> Watch:
        """As sapus."""
        return Watch()

    def after_step(self, w: Watch, step: Step) -> Push | None:
        """As sapus."""
        return sapus.watch(w, step, sample=self.sample, overlap=self.overlap)

    def after_reply(self, w: Watch, local: Vec, pulled: Vec, hint: Mapping[str, float]) -> None:
        """As sapus."""
        local.copy_(pulled)
        sapus.heed(w, hint)

    def init_server(self, x0: Vec, n_workers: int) -> Window:
        """Open an empty window."""
        return Window(x0, weight=1 / n_workers, n_workers=n_workers, past=deque(maxlen=PAST * n_workers))

    def on_push(self, s: Window, msg: Received) -> Sequence[Reply]:
        """Enter the push into the window, weigh it by the window, apply it, and answer as sapus does."""
        enter(s, msg)
        weight, info = window_weight(s, msg) if self.weighting == "window" else loss_share(s, msg, self.power)
        s.x.add_(msg.vector, alpha=weight)
        s.seen[msg.worker].at_pull = dict(s.losses)
        return sapus.answer(s, msg, self, {"weight": weight, "own_loss": msg.loss, **info})

    def on_join(self, s: Window, worker: int) -> Sequence[Reply]:
        """As sapus."""
        return sapus.welcome(s, worker, self)

    def on_leave(self, s: Window, worker: int) -> Sequence[Reply]:
        """Take a worker out of all sums."""
        for known in (s.times, s.told, s.losses, s.seen):
            known.pop(worker, None)
        return ()


def enter(s: Window, msg: Received) -> None:
    """Take a push's loss, its variance (smoothed 0.8/0.2) and its timing into the window."""
    given, before = msg.info.get("loss_variance"), s.losses.get(msg.worker)
    # A loss whose variance nobody knows yet (one step, no difference) cannot be compared: it stays out.
    if isinstance(given, float) and math.isfinite(given):
        variance = max(given, FLOOR)
        if before is not None:
            variance = before[1] + SMOOTHING * (variance - before[1])
        s.losses[msg.worker] = (msg.loss, variance)
    worker = s.seen.get(msg.worker)
    if worker is None:
        worker = s.seen[msg.worker] = Seen(msg.now, msg.n_steps, at_pull=dict(s.losses))
    else:
        worker.interval_s = msg.now - worker.pushed_s
        worker.pushed_s, worker.n_steps = msg.now, msg.n_steps
    worker.staleness = msg.staleness
    worker.z = improvement(worker.at_pull, s.losses, without=msg.worker)
    s.past.append(dict(s.losses))
    s.pushes += 1


def window_weight(s: Window, msg: Received) -> tuple[float, dict[str, float]]:
    """The weight of a push by the global-loss window, and what led to it."""
    n = len(s.members)
    z_now = {j: max(seen.z, improvement(seen.at_pull, s.losses, without=j)) for j, seen in s.seen.items()}
    z_typical = max(0.0, low_median([seen.z for seen in s.seen.values()]))
    fresh = {j: freshness(z, z_typical) for j, z in z_now.items()}
    rates = {j: rate(seen, msg.now) for j, seen in s.seen.items()}
    known = sorted(r for r in rates.values() if math.isfinite(r))
    reference = known[len(known) // 2] if known else 0.0
    # A worker that has never pushed counts as one that contributes.
    n_eff = max(1.0, n - len(s.seen) + sum(part(rates[j], reference) * fresh[j] for j in s.seen))
    fall = improvement(s.past[0], s.losses) if s.pushes > n else 0.0
    beyond = max(0.0, fall - 1)
    phi = 1 - 1 / (1 + beyond * beyond)  # a power would raise an error where a product becomes infinite
    share = s.weight * (1 + phi * fresh[msg.worker] * max(0.0, n / n_eff - 1))
    tau = low_median([seen.staleness for seen in s.seen.values()])
    weight = min(1.0, max(s.weight, 1.5 / (1 + tau)), share)
    return weight, {"n_eff": n_eff, "phi": phi, "freshness": fresh[msg.worker]}


def loss_share(s: Window, msg: Received, power: float) -> tuple[float, dict[str, float]]:
    """The plain share (1/N) r_i / mean r over the window, r = loss^-power; 1/N for who is not in it yet."""
    if msg.worker not in s.losses:
        return s.weight, {}
    losses = {j: max(loss, FLOOR) for j, (loss, _) in s.losses.items()}
    # Against the least loss, which cancels, no share overflows, and one of them is 1.
    least = min(losses.values())
    shares = {j: (least / loss) ** power for j, loss in losses.items()}
    return s.weight * shares[msg.worker] * len(shares) / sum(shares.values()), {}


def improvement(then: Losses, now: Losses, without: int | None = None) -> float:
    """How much the losses have fallen, in standard deviations of the difference; over the workers in both windows."""
    both = [j for j in then if j in now and j != without]
    spread = sum(then[j][1] + now[j][1] for j in both)
    return sum(then[j][0] - now[j][0] for j in both) / math.sqrt(spread) if both else 0.0


def freshness(z: float, typical: float) -> float:
    """1 for a push that missed no more than is usual, falling with the square of what it missed beyond."""
    q = max(0.0, z - typical - 1) / (1 + typical)
    return 1 / (1 + q * q)


def rate(seen: Seen, now: float) -> float:
    """Steps a second of a worker; it falls while the worker stays silent. Infinite at the moment of its first push."""
    seconds = max(seen.interval_s, (now - seen.pushed_s) / 1.5)
    return seen.n_steps / seconds if seconds > 0 else math.inf


def part(rate_: float, reference: float) -> float:
    """What a worker contributes of what is usual, at most 1."""
    return 1.0 if rate_ >= reference else rate_ / reference


def low_median(values: Sequence[float]) -> float:
    """The top of the lower half."""
    return sorted(values)[(len(values) - 1) // 2]
