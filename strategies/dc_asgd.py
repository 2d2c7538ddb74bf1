"""Asynchronous SGD with delay compensation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from sapus_cli.strategy import Push, Received, Reply, Step, Strategy, Vec, require_between
from strategies.asp import Weighted

if TYPE_CHECKING:
    from collections.abc import Sequence

TINY = 1e-12
"""Added to the mean square of the updates: keeps elements finite that have never moved."""


@dataclass
class Backups(Weighted):
    """The global state, what each worker pulled last, and the running mean square of the updates."""

    pulled: dict[int, Vec] = field(default_factory=dict)
    mean_square: Vec | None = None
    scratch: Vec | None = None


@dataclass(frozen=True)
class DcAsgd(Strategy[None, Backups]):
    """Delay-compensated asynchronous SGD: asp that corrects a stale update for how far the global state has moved.

    Rule: x <- x + (1/N) (u - lam/sqrt(ms) * u * u * (x - x_i)), x_i the state worker i pulled, elementwise;
        ms <- m ms + (1 - m) u * u (adaptive), or 1 in the place of sqrt(ms) (constant).
    Source: Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017, eq. 10 and
        Algorithm 2. There x <- x - eta (g + lambda_t g * g * (x - x_i)), lambda_t = lambda_0/sqrt(ms of g).

    With plain SGD and one local step u = -eta g. Put in, eta cancels from the adaptive form, so lam is the paper's
    lambda_0; in the constant form lam is lambda/eta: for the paper's 0.04 at learning rate 0.5 set 0.08. With momentum,
    or for BatchNorm statistics, u is no gradient and the compensation a heuristic.

    Deviations: pushes weigh 1/N with scale "mean", as in asp; the paper's weight is scale "sum". The correction of an
    element is limited to the size of its update, beyond which the expansion behind the rule means nothing.

    The server keeps one state vector for each worker.

    Hyper-parameters:
        lam: strength of the compensation, at least 0; 0 is asp. Default 2: the paper's lambda_0 (adaptive).
        m: decay of the mean square, in [0, 1]; adaptive only. Default 0.95: the paper's.
        variant: adaptive or constant. Default adaptive: the better one in the paper.
        scale: mean or sum, as in asp. Default mean.
    """

    lam: float = 2.0
    m: float = 0.95
    variant: Literal["adaptive", "constant"] = "adaptive"
    scale: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_between("lam", self.lam, 0.0)
        require_between("m", self.m, 0.0, 1.0)

    def init_worker(self, x0: Vec, worker: int) -> None:
        """Keep nothing."""

    def after_step(self, w: None, step: Step) -> Push | None:
        """Push always."""
        return Push()

    def init_server(self, x0: Vec, n_workers: int) -> Backups:
        """Fix the weight of every push."""
        s = Backups(x0, weight=1 / n_workers if self.scale == "mean" else 1.0)
        if self.variant == "adaptive":
            s.mean_square, s.scratch = x0.new_zeros(x0.shape), x0.clone()
        return s

    def on_push(self, s: Backups, msg: Received) -> Sequence[Reply]:
        """Compensate, apply and answer at once."""
        u, pulled = msg.vector, s.pulled[msg.worker]
        factor = pulled.sub_(s.x).mul_(u)
        if s.mean_square is not None and s.scratch is not None:
            s.mean_square.mul_(self.m).addcmul_(u, u, value=1 - self.m)
            factor.div_(s.scratch.copy_(s.mean_square).add_(TINY).sqrt_())
        factor.mul_(self.lam).clamp_(-1.0, 1.0)
        s.x.add_(u.addcmul_(u, factor), alpha=s.weight)
        pulled.copy_(s.x)
        return (Reply(msg.worker, info={"weight": s.weight}),)

    def on_join(self, s: Backups, worker: int) -> Sequence[Reply]:
        """Remember what the newcomer pulls."""
        s.pulled[worker] = s.x.clone()
        return (Reply(worker),)

    def on_leave(self, s: Backups, worker: int) -> Sequence[Reply]:
        """Forget what it had pulled."""
        s.pulled.pop(worker, None)
        return ()
