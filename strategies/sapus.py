"""SaPus: every worker decides by itself, from its accumulated update, when to push."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from sapus_cli.performance import (
    MOST_STEPS,
    Load,
    LowerBound,
    ServerLoad,
    WorkerTimes,
    curvature_upper,
    marginal_due,
    marginal_elasticity,
    momentum_bound,
    resource_bound,
    slope_known,
    theoretical_lower,
    theoretical_upper,
)
from sapus_cli.strategy import Push, Received, Reply, ServerState, Step, Strategy, Vec, require_between, require_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sapus_cli.strategy import Info

Part = Literal["nothing", "trigger", "theory", "resource", "upper", "drain"]

ROW = 64
COLUMNS = ("lower", "resource", "statistic", "slope", "c", "loss_variance")


@dataclass
class Watch:
    """Worker state: the growth of the update in this interval, its losses, and the bounds that came last."""

    difference: Vec | None = None
    norms: list[float] = field(default_factory=list)
    loss: float | None = None
    squares: float = 0.0
    n_squares: int = 0
    h_min: int = 1
    h_max: int = 1
    c: float = 0.0
    step_s: float = 0.0
    measured: bool = False
    replied: bool = False
    first_s: float = 0.0
    elapsed_s: float = 0.0


class Bounds(NamedTuple):
    """What a worker was told: the bounds of its interval in steps, what set the lower one, its exchange in steps."""

    h_min: int = 1
    h_max: int = 1
    lower: str = "none"
    resource: str = "none"
    c: float = 0.0
    step_s: float = 0.0
    measured: bool = False


class Bounding(Protocol):
    """The hyper-parameters that bound an interval; see `Sapus`."""

    @property
    def rho(self) -> float:
        """Share of time that a resource may be busy."""

    @property
    def horizon(self) -> float:
        """Steps after which a step is worth half."""

    @property
    def overlap(self) -> bool:
        """Whether the worker steps on while an exchange is in flight."""

    @property
    def lr_curvature(self) -> float:
        """Learning rate times curvature; 0 if unknown."""

    @property
    def without(self) -> Part:
        """Which part is left out."""


@dataclass
class Measured(ServerState):
    """Server state: what every worker and the server itself have shown, and what each worker was told last."""

    weight: float = 1.0
    n_workers: int = 1
    load: ServerLoad = field(default_factory=ServerLoad)
    times: dict[int, WorkerTimes] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    told: dict[int, Bounds] = field(default_factory=dict)


@dataclass(frozen=True)
class Sapus(Strategy[Watch, Measured]):
    """SaPus, unweighted: each worker pushes when another step would bring less a second than its interval did so far.

    Rule: push at the first k in [H_min, H_max] with a'(k) <= a(k) / (k + c), a(k) = |u_k|, c = t_x / t_s;
        x <- x + (1/N) u_i; no barrier. H_min is a resource-aware bound, or without overlap the larger of that and a
        theoretical one; H_max is max(H_min, sqrt(T/N)). With overlap a worker adds to both the whole steps that its
        last exchange spent in queues.
    Source: the parts are those of the abstract of Zhang and Wang, "SaPus: Self-adaptive parameter update strategy for
        DNN training on multi-GPU clusters", IEEE TPDS 33(7), 2022; the formulas are this project's construction of
        them (docs/algorithm.md), not quoted from the paper.

    Hyper-parameters:
        rho: the share of time that the server's link and processor may be busy, in (0, 1]. Default 0.9: ours; below
            it queues stay short.
        horizon: h, the length of an interval whose steps are worth half on average, above 0; not used with overlap.
            Default 40: ours, argued and not tuned; sixteen times as much about doubles the bound (docs/algorithm.md).
        overlap: keep stepping while an exchange is in flight. Default true: ours (docs/algorithm.md).
        sample: elements of the update whose norm is watched, in rows of 64 spread evenly, at least 64. Default
            16384: ours; docs/algorithm.md has the cost.
        lr_curvature: learning rate times the largest eigenvalue of the Hessian, where it is known, at least 0: adds
            eta L + (eta L)^2 H (H - 1) <= 1 (Wang and Joshi 2018) to the upper bound. Default 0: not known, no bound.
        without: the part that is left out, to see what it is worth: "trigger" (push at H_min), "theory", "resource"
            (with the drain and the late first push) and "upper" (the bounds), "drain" (queues are not waited out) or
            "nothing". Default "nothing": ours.
        boost: every push weighs boost/N, above 0: with the mean weight of a sapus-weighted run it is the control that
            tells what the window adds. Default 1: ours.
    """

    columns = COLUMNS

    rho: float = 0.9
    horizon: float = 40.0
    overlap: bool = True
    sample: int = 16_384
    lr_curvature: float = 0.0
    without: Part = "nothing"
    boost: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        check(self.rho, self.horizon, self.sample, self.lr_curvature)
        require_between("boost", self.boost, 0.0, open_low=True)

    def init_worker(self, x0: Vec, worker: int) -> Watch:
        """Push at once at first: bounds need a measured exchange."""
        return Watch()

    def after_step(self, w: Watch, step: Step) -> Push | None:
        """Push between the bounds, when the accumulated update grows too slowly for what the exchange costs."""
        return watch(w, step, sample=self.sample, overlap=self.overlap)

    def after_reply(self, w: Watch, local: Vec, pulled: Vec, hint: Mapping[str, float]) -> None:
        """Take over the global state and the new bounds."""
        local.copy_(pulled)
        heed(w, hint)

    def init_server(self, x0: Vec, n_workers: int) -> Measured:
        """Know nothing yet."""
        return Measured(x0, weight=self.boost / n_workers, n_workers=n_workers)

    def on_push(self, s: Measured, msg: Received) -> Sequence[Reply]:
        """Apply at once, learn from the timings, and tell the worker its next bounds."""
        s.x.add_(msg.vector, alpha=s.weight)
        return answer(s, msg, self, {"weight": s.weight})

    def on_join(self, s: Measured, worker: int) -> Sequence[Reply]:
        """Where the link is known, tell a worker how long its first interval lasts."""
        return welcome(s, worker, self)

    def on_leave(self, s: Measured, worker: int) -> Sequence[Reply]:
        """Forget a worker's timings: one that comes back is measured afresh."""
        s.times.pop(worker, None)
        s.told.pop(worker, None)
        return ()


def check(rho: float, horizon: float, sample: int, lr_curvature: float) -> None:
    """Refuse hyper-parameters out of range.

    Raises:
        ValueError: says the range.
    """
    require_between("rho", rho, 0.0, 1.0, open_low=True)
    require_between("horizon", horizon, 0.0, open_low=True)
    require_whole("sample", sample, ROW)
    require_between("lr_curvature", lr_curvature, 0.0)


def rows(vector: Vec, sample: int) -> Vec:
    """A view of about `sample` elements of a vector, shape `(d,)`, in rows of 64 spread evenly; all if it is short."""
    if vector.numel() <= sample:
        return vector
    n_rows = sample // ROW
    return vector.as_strided((n_rows, ROW), (vector.numel() // n_rows, 1))


def watch(w: Watch, step: Step, *, sample: int, overlap: bool) -> Push | None:
    """The worker half: follow the update's norm and the batch losses, and decide whether to push."""
    import torch  # noqa: PLC0415 - at the top it would slow every command line down

    # The statistics of BatchNorm are left out: they would drown the parameters, and they grow by a rule of their own.
    params, pulled = (rows(vector[: step.n_params], sample) for vector in (step.params, step.pulled))
    if w.difference is None:
        w.difference = torch.empty_like(params, memory_format=torch.contiguous_format)
    flat = torch.sub(params, pulled, out=w.difference).view(-1)
    # Steps taken in flight were not watched: their norms are not known.
    w.norms += [0.0] * (step.k - 1 - len(w.norms)) + [math.sqrt(float(flat.dot(flat)))]
    if w.replied:
        w.replied = False
        queue_out(w, step.exchange_s, step.k - 1)
    # A loss that is not finite would stay in the server's window, after its own push has been declined.
    loss = step.loss if math.isfinite(step.loss) else None
    if w.loss is not None and loss is not None:
        w.squares += (loss - w.loss) ** 2
        w.n_squares += 1
    w.loss = loss
    w.elapsed_s += step.step_s
    reason = due(w, step)
    if reason is None:
        return None
    info: dict[str, float | str] = {
        "reason": reason,
        "h_min": w.h_min,
        "h_max": w.h_max,
        "c": w.c,
        "statistic": w.norms[-1],
    }
    if slope_known(w.norms):
        info["slope"] = marginal_elasticity(w.norms) * w.norms[-1] / step.k
    if w.n_squares:
        # Half the mean squared successive difference is the variance of a batch loss, whatever its trend.
        info["loss_variance"] = w.squares / w.n_squares / (2 * step.k)
    w.norms.clear()
    w.squares, w.n_squares = 0.0, 0
    # Until an exchange has been measured, nobody knows what it costs to wait for one.
    return Push(info=info, wait=w.measured and not overlap)


def queue_out(w: Watch, exchange_s: float, in_flight: int) -> None:
    """Make the interval longer by the time that its worker's last exchange has spent in queues, in whole steps.

    A reply is noticed when a step ends, so that an exchange that meets nobody lasts for ceil(c) steps, one at least,
    and they may be long ones: the time in queues is what both the clock and the steps taken in flight say.
    """
    if w.step_s > 0:
        queued = min(math.floor(exchange_s / w.step_s - w.c), in_flight - max(1, math.ceil(w.c)))
        w.h_min = min(MOST_STEPS, w.h_min + max(0, queued))
        w.h_max = max(w.h_min, w.h_max)


def due(w: Watch, step: Step) -> str | None:
    """Why to push now, or None."""
    if step.last:
        return "last"
    if w.elapsed_s < w.first_s:
        return None
    if step.k >= w.h_max:
        return "upper"
    if step.k >= w.h_min and marginal_due(w.norms, w.c):
        return "marginal"
    return None


def heed(w: Watch, hint: Mapping[str, float]) -> None:
    """Take over the bounds that came with a reply, or with the first state how long the first interval lasts."""
    w.first_s = hint.get("first_s", 0.0)
    if "first_s" in hint:
        return
    w.h_min, w.h_max, w.c = int(hint["h_min"]), int(hint["h_max"]), hint["c"]
    w.measured = hint["measured"] > 0
    w.step_s, w.replied = hint["step_s"], True


def answer(s: Measured, msg: Received, bounding: Bounding, info: Info) -> tuple[Reply, ...]:
    """Learn from a push and answer it: the global state, the worker's next bounds, and what bounded this push."""
    before = s.told.get(msg.worker, Bounds())
    bounds = s.told[msg.worker] = bounds_of(s, msg, bounding)
    hint = {
        "h_min": bounds.h_min,
        "h_max": bounds.h_max,
        "c": bounds.c,
        "step_s": bounds.step_s if bounding.overlap and bounding.without not in {"drain", "resource"} else 0.0,
        "measured": float(bounds.measured),
    }
    # A tail that the protocol pushed by itself carries no bounds: they are those that its worker was told.
    told = {"h_min": before.h_min, "h_max": before.h_max, "c": before.c}
    missing = {key: value for key, value in told.items() if key not in msg.info}
    facts = {"lower": before.lower, "resource": before.resource, **missing, **info}
    return (Reply(msg.worker, hint=hint, info=facts),)


def bounds_of(s: Measured, msg: Received, bounding: Bounding) -> Bounds:
    """The bounds of a worker's next interval, from everything measured so far, this push included."""
    times = s.times.setdefault(msg.worker, WorkerTimes())
    times.add(msg.step_s, msg.exchange_s)
    s.steps[msg.worker] = s.steps.get(msg.worker, 0) + msg.n_steps
    s.load.add(msg.server_cpu_s, msg.exchange_s, msg.bytes)
    step_s, exchange_s = times.step_s.value, unqueued(s, msg, times)
    if not step_s or exchange_s is None:
        return Bounds()
    rate = s.setting.link_bytes_per_s or s.load.measured_bytes_per_s or math.inf
    c = exchange_s / step_s
    load = Load(msg.bytes, rate, s.load.cpu_s.value or 0.0, s.setting.server_cores, s.setting.memory_bytes)
    n = len(s.members)
    resource = resource_bound(
        workers=n,
        step_s=step_s,
        exchange_s=exchange_s,
        load=load,
        rho=bounding.rho,
        overlap=bounding.overlap,
        least=[one.step_s.value or 0.0 for one in s.times.values()],
    )
    if bounding.without == "resource":
        resource = LowerBound(1, "none")
    # An exchange that overlaps with computing costs the worker no time that a longer interval would save.
    theory = 1 if bounding.overlap or bounding.without == "theory" else theoretical_lower(c, bounding.horizon)
    h_min = max(resource.steps, theory)
    lower = "theory" if theory > resource.steps else "none" if resource.resource == "none" else "resource"
    if s.setting.momentum > 0:
        unbound, h_min = h_min, momentum_bound(h_min, c, s.setting.momentum)
        lower = lower if h_min == unbound else "momentum"
    upper = theoretical_upper(s.steps[msg.worker], n)
    if bounding.lr_curvature > 0:
        upper = min(upper, curvature_upper(bounding.lr_curvature))
    if bounding.without == "upper":
        upper = MOST_STEPS
    # With momentum, 1 was chosen because the intervals that follow it are bad: the trigger may not lengthen it.
    if bounding.without == "trigger" or (s.setting.momentum > 0 and h_min == 1):
        upper = 1
    h_max = max(h_min, upper)
    binding = resource.resource if lower == "resource" else "none"
    return Bounds(h_min, h_max, lower, binding, c, step_s, measured=True)


def welcome(s: Measured, worker: int, bounding: Bounding) -> tuple[Reply, ...]:
    """Answer a worker that joins, and tell it to wait with its first push, if the link's rate is known.

    All workers fetch their first state at the same time; those states and the first pushes together would keep a dear
    link full for long.
    """
    rate = s.setting.link_bytes_per_s
    if rate is None or bounding.without == "resource":
        return (Reply(worker),)
    return (Reply(worker, hint={"first_s": s.n_workers * s.x.numel() * s.setting.element_bytes / rate}),)


def unqueued(s: Measured, msg: Received, times: WorkerTimes) -> float | None:
    """Seconds that an exchange of a worker takes while nobody else is in its way; None if nobody knows yet."""
    rate = s.setting.link_bytes_per_s
    if rate is None:
        return times.exchange_s
    alone = 2 * (msg.bytes / rate + s.setting.link_latency_s) + (s.load.cpu_s.value or 0.0)
    return alone if times.exchange_s is None else min(alone, times.exchange_s)
