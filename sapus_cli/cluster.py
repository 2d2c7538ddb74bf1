"""What an experiment runs on: step times and the server's link. Pure models, seeded; the virtual driver simulates them.

Units inside are seconds, bytes and bytes a second; profiles and options carry their units ("50ms", "10gbit").
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from sapus_cli.errors import UserError, unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
BYTES_PER_S = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}
MOST_WORKERS = 4096
Wire: TypeAlias = Literal["float32", "bfloat16", "float16"]
ELEMENT_BYTES: dict[Wire, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_BLOCK = 256
_FAULTS = ("kill", "restart")


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """With this probability a step is followed by a pause, Pareto-distributed with this mean and shape."""

    probability: float
    mean_s: float
    shape: float = 1.5


class Period(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some workers compute for `on_s` seconds and stand still for `off_s`, in turns."""

    on_s: float
    off_s: float
    workers: tuple[int, ...]


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server's network interface: a rate in each direction (None: no limit), and a latency of each message."""

    bytes_per_s: float | None = None
    latency_s: float = 0.0


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At `at_s` seconds a worker is killed, or one that was killed is started again."""

    kind: Literal["kill", "restart"]
    worker: int
    at_s: float


class ServerCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CPU seconds that the server spends on a message, and on each of its bytes.

    Virtual time takes them for all messages; emulation for the bytes only that `wire_scale` adds. The defaults are
    stated, not measured on any machine of yours: 50 us a message, 0.17 s a gigabyte.
    """

    message_s: float = 50e-6
    byte_s: float = 0.17e-9


class ClusterProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cluster. With nothing given it is none: steps take what they take, and messages arrive when they arrive.

    Attributes:
        step_s: mean seconds of a local step; None: as long as it takes.
        variation: coefficient of variation of the step time, log-normal.
        slow: worker -> factor on its step time.
        pause: heavy-tailed pauses after steps.
        period: on/off periods.
        link: the server's link.
        wire_scale: every message counts on the link as this many times its bytes, to study a large model with the
            arithmetic of a small one.
        server: what messages cost the server.
        faults: workers that are killed and started again, in any order.
    """

    name: str = "none"
    description: str = ""
    step_s: float | None = None
    variation: float = 0.0
    slow: dict[int, float] = msgspec.field(default_factory=dict)
    pause: Pause | None = None
    period: Period | None = None
    link: Link = msgspec.field(default_factory=Link)
    wire_scale: float = 1.0
    server: ServerCost = msgspec.field(default_factory=ServerCost)
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            UserError: names the key, the value and the range.
        """
        _positive("step", self.step_s)
        _positive("link rate", self.link.bytes_per_s)
        _positive("wire_scale", self.wire_scale)
        _not_negative("variation", self.variation)
        _not_negative("link latency", self.link.latency_s)
        _not_negative("server message", self.server.message_s)
        _not_negative("server byte", self.server.byte_s)
        for worker, factor in self.slow.items():
            _positive(f"slow {worker}", factor)
        if self.pause is not None:
            if not 0 <= self.pause.probability <= 1:
                raise UserError(f"cluster: pause probability {self.pause.probability:g}: must lie in [0, 1]")
            _positive("pause mean", self.pause.mean_s)
            if not self.pause.shape > 1:
                raise UserError(f"cluster: pause shape {self.pause.shape:g}: must be above 1, or there is no mean")
        if self.period is not None:
            _positive("period on", self.period.on_s)
            _positive("period off", self.period.off_s)
        if self.step_s is None and (self.slow or self.pause or self.period or self.variation):
            raise UserError("cluster: slow, pause, period and variation need a step time, as in --step-time 50ms")
        self._check_faults()

    def check_workers(self, workers: int) -> None:
        """Refuse a profile that names workers which do not exist.

        Raises:
            UserError: names the key and the worker.
        """
        named = {
            "slow": self.slow,
            "period": self.period.workers if self.period else (),
            "fault": [fault.worker for fault in self.faults],
        }
        for key, ranks in named.items():
            for rank in ranks:
                if not 0 <= rank < workers:
                    raise UserError(f"cluster: {key} names worker {rank}, but the workers are 0 to {workers - 1}")

    def check_budget(self, seconds: float | None) -> None:
        """Refuse a fault that comes after the end of a budget in seconds.

        Raises:
            UserError: names the fault.
        """
        for fault in self.faults:
            if seconds is not None and fault.at_s >= seconds:
                raise UserError(
                    f"cluster: fault {fault.kind} of worker {fault.worker} at {fault.at_s:g} s comes after the budget "
                    f"of {seconds:g} s; give an earlier time, or more seconds"
                )

    def comes_back(self, worker: int, kills: int) -> bool:
        """Whether a worker is started again after it was killed for the `kills`-th time."""
        return sum(fault.kind == "restart" and fault.worker == worker for fault in self.faults) >= kills

    @property
    def shapes(self) -> bool:
        """Whether the link holds messages up at all."""
        return self.link != Link()

    def scaled(self, n_bytes: int) -> int:
        """What a message of so many bytes counts as on the link."""
        return n_bytes if self.wire_scale == 1 else round(n_bytes * self.wire_scale)

    def _check_faults(self) -> None:
        dead: set[int] = set()
        for fault in sorted(self.faults, key=lambda fault: fault.at_s):
            _positive("fault time", fault.at_s)
            if (fault.kind == "kill") == (fault.worker in dead):
                state = "dead" if fault.kind == "kill" else "alive"
                raise UserError(
                    f"cluster: fault {fault.kind} of worker {fault.worker} at {fault.at_s:g} s: it is {state} then; "
                    "a worker is killed first, and then started again"
                )
            dead ^= {fault.worker}


@dataclass
class StepTimes:
    """The step times of one worker: a function of seed, worker and step number alone."""

    profile: ClusterProfile
    seed: int
    worker: int
    _block: int = -1
    _seconds: Any = None

    def draw(self, step: int) -> float:
        """Seconds that step number `step` (0, 1, ...) takes, a pause after it included, on/off periods not."""
        block, place = divmod(step, _BLOCK)
        if block != self._block:
            self._block, self._seconds = block, self._draw_block(block)
        return float(self._seconds[place])

    def finish(self, begin: float, seconds: float) -> float:
        """When a computation of so many seconds ends that begins at `begin`, seconds since the start of the run."""
        period = self.profile.period
        if period is None or self.worker not in period.workers:
            return begin + seconds
        cycle = period.on_s + period.off_s
        whole, place = divmod(begin, cycle)
        # Seconds of computing done since time 0, and how many must have been done at the end.
        done = whole * period.on_s + min(place, period.on_s) + seconds
        cycles, rest = divmod(done, period.on_s)
        if rest == 0:
            return (cycles - 1) * cycle + period.on_s
        return cycles * cycle + rest

    def _draw_block(self, block: int) -> Any:
        import numpy as np  # noqa: PLC0415 - every command line reads this module

        profile = self.profile
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(self.worker, block, 7)))
        seconds = np.full(_BLOCK, profile.step_s or 0.0)
        if profile.variation > 0:
            sigma = math.sqrt(math.log(1 + profile.variation**2))
            seconds *= np.exp(sigma * rng.standard_normal(_BLOCK) - sigma**2 / 2)
        seconds *= profile.slow.get(self.worker, 1.0)
        if profile.pause is not None:
            hit = rng.random(_BLOCK) < profile.pause.probability
            least = profile.pause.mean_s * (profile.pause.shape - 1) / profile.pause.shape
            seconds += hit * least * (1 + rng.pareto(profile.pause.shape, _BLOCK))
        return seconds


@dataclass
class Direction:
    """One direction of a link: first in, first out, one message at a time."""

    link: Link
    scale: float = 1.0
    free_at: float = 0.0

    def deliver_at(self, now: float, n_bytes: int) -> float:
        """When a message of so many bytes, handed over at `now`, has arrived; both in seconds."""
        self.free_at = self._passed(now, n_bytes)
        return self.free_at + self.link.latency_s

    def arrival(self, now: float, n_bytes: int) -> float:
        """When such a message would arrive if it were the next; nothing is changed."""
        return self._passed(now, n_bytes) + self.link.latency_s

    def _passed(self, now: float, n_bytes: int) -> float:
        start = max(now, self.free_at)
        return start if self.link.bytes_per_s is None else start + n_bytes * self.scale / self.link.bytes_per_s


@dataclass
class ServerTime:
    """The server's one thread: it has one message at a time in hand, in the order in which they come."""

    free_at: float = 0.0

    def done_at(self, now: float, seconds: float) -> float:
        """When a message that comes at `now` and keeps the server busy for so many seconds has been handled."""
        self.free_at = max(now, self.free_at) + seconds
        return self.free_at


def shipped_profiles() -> dict[str, Any]:
    """The profiles that ship: name -> file."""
    folder = resources.files("experiments").joinpath("clusters")
    return {path.name.removesuffix(".toml"): path for path in folder.iterdir()}


def load_profile(name: str) -> ClusterProfile:
    """A profile that ships, by name, or from a TOML file, by its path.

    Raises:
        UserError: there is none, it is malformed, or it has an unknown key or a value out of range.
    """
    if name == "none":
        return ClusterProfile()
    shipped = shipped_profiles()
    source = shipped[name] if name in shipped else Path(name)
    if name not in shipped and not Path(name).is_file():
        raise unknown("cluster", name, ["none", *shipped], "Or give the path of a TOML file.")
    try:
        table = tomllib.loads(source.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cluster {name}: {error}") from error
    return profile_of(Path(name).stem, table)


def profile_of(name: str, table: dict[str, Any]) -> ClusterProfile:
    """Make a profile from a TOML table, whose times and rates are text with a unit.

    Raises:
        UserError: names the key.
    """
    where = f"cluster {name}"
    step, link = _table(where, table, "step"), _table(where, table, "link")
    fields: dict[str, Any] = {
        "name": name,
        "description": table.get("description", ""),
        "step_s": seconds(f"{where}: step.mean", step["mean"]) if "mean" in step else None,
        "variation": step.get("variation", 0.0),
        "slow": {_rank(f"{where}: step.slow", key): value for key, value in step.get("slow", {}).items()},
        "link": {
            "bytes_per_s": bytes_per_s(f"{where}: link.rate", link["rate"]) if "rate" in link else None,
            "latency_s": seconds(f"{where}: link.latency", link["latency"]) if "latency" in link else 0.0,
        },
        "wire_scale": table.get("wire_scale", 1.0),
    }
    if "pause" in step:
        pause = step["pause"]
        fields["pause"] = {
            "probability": pause.get("probability"),
            "mean_s": seconds(f"{where}: step.pause.mean", pause.get("mean")),
            **({"shape": pause["shape"]} if "shape" in pause else {}),
        }
        _only(where, pause, {"probability", "mean", "shape"}, "step.pause.")
    if "period" in step:
        period = step["period"]
        fields["period"] = {
            "on_s": seconds(f"{where}: step.period.on", period.get("on")),
            "off_s": seconds(f"{where}: step.period.off", period.get("off")),
            "workers": period.get("workers"),
        }
        _only(where, period, {"on", "off", "workers"}, "step.period.")
    if "fault" in table:
        fields["faults"] = _faults(where, table["fault"])
    if "server" in table:
        fields["server"] = table["server"]
    _only(where, table, {"description", "step", "link", "wire_scale", "server", "fault"}, "")
    _only(where, step, {"mean", "variation", "slow", "pause", "period"}, "step.")
    _only(where, link, {"rate", "latency"}, "link.")
    try:
        return msgspec.convert(fields, ClusterProfile)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(f"{where}: {error}") from None


def to_toml(profile: ClusterProfile) -> str:
    """The TOML that `profile_of` reads back as the same profile, but for its name."""
    lines = [f"description = {json.dumps(profile.description)}"] if profile.description else []
    lines.append(f"wire_scale = {profile.wire_scale!r}")
    step = [] if profile.step_s is None else [f'mean = "{profile.step_s!r}s"', f"variation = {profile.variation!r}"]
    sections: dict[str, list[str]] = {
        "[step]": step,
        "[step.slow]": [f"{rank} = {factor!r}" for rank, factor in profile.slow.items()],
    }
    if (pause := profile.pause) is not None:
        sections["[step.pause]"] = [
            f"probability = {pause.probability!r}",
            f'mean = "{pause.mean_s!r}s"',
            f"shape = {pause.shape!r}",
        ]
    if (period := profile.period) is not None:
        sections["[step.period]"] = [
            f'on = "{period.on_s!r}s"',
            f'off = "{period.off_s!r}s"',
            f"workers = {list(period.workers)}",
        ]
    rate = [] if profile.link.bytes_per_s is None else [f'rate = "{profile.link.bytes_per_s / 125!r}kbit"']
    sections["[link]"] = [*rate, f'latency = "{profile.link.latency_s!r}s"']
    sections["[server]"] = [f"message_s = {profile.server.message_s!r}", f"byte_s = {profile.server.byte_s!r}"]
    for name, entries in sections.items():
        if entries:
            lines += ["", name, *entries]
    for fault in profile.faults:
        lines += ["", "[[fault]]", f'kind = "{fault.kind}"', f"worker = {fault.worker}", f'at = "{fault.at_s!r}s"']
    return "\n".join(lines) + "\n"


def changed(
    profile: ClusterProfile,
    *,
    step_time: str | None = None,
    link: str | None = None,
    slow: str | None = None,
    pause: str | None = None,
    fault: Sequence[str] = (),
    wire_scale: float | None = None,
) -> ClusterProfile:
    """A profile with single values changed, in the text forms of the command line.

    Raises:
        UserError: names the option and the value.
    """
    changes: dict[str, object] = {}
    if step_time is not None:
        changes["step_s"] = seconds("--step-time", step_time)
    if link is not None:
        changes["link"] = read_link(link)
    if slow is not None:
        changes["slow"] = read_slow(slow)
    if pause is not None:
        changes["pause"] = read_pause(pause)
    if fault:
        changes["faults"] = tuple(read_fault(text) for text in fault)
    if wire_scale is not None:
        changes["wire_scale"] = wire_scale
    if changes:
        changes["name"] = "custom" if profile.name == "none" else f"{profile.name}, changed"
    return msgspec.structs.replace(profile, **changes)


def seconds(what: str, text: object) -> float:
    """Read a time such as 50ms.

    Raises:
        UserError: names what it is, the value, and the units.
    """
    return _quantity(what, text, SECONDS, "50ms")


def bytes_per_s(what: str, text: object) -> float:
    """Read a rate such as 10gbit (a second), as bytes a second.

    Raises:
        UserError: names what it is, the value, and the units.
    """
    return _quantity(what, text, BYTES_PER_S, "10gbit")


def read_link(text: str) -> Link:
    """Read --link RATE[,LATENCY], where the rate may be none: no limit.

    Raises:
        UserError: it has another form.
    """
    rate, comma, latency = text.partition(",")
    return Link(
        bytes_per_s=None if rate.strip() == "none" else bytes_per_s("--link rate", rate),
        latency_s=seconds("--link latency", latency) if comma else 0.0,
    )


def read_slow(text: str) -> dict[int, float]:
    """Read --slow WORKER:FACTORx,...

    Raises:
        UserError: it has another form.
    """
    slow = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+):([0-9.]+)x\s*", part)
        if match is None or match[2].count(".") > 1 or match[2] == ".":
            raise UserError(f"--slow {text}: must be WORKER:FACTORx, as in 6:2x,7:4x")
        slow[int(match[1])] = float(match[2])
    return slow


def read_pause(text: str) -> Pause:
    """Read --pause PROBABILITY:MEAN.

    Raises:
        UserError: it has another form.
    """
    probability, colon, mean = text.partition(":")
    try:
        chance = float(probability)
    except ValueError:
        chance = math.nan
    if not colon or not 0 <= chance <= 1:
        raise UserError(f"--pause {text}: must be PROBABILITY:MEAN with a probability in [0, 1], as in 0.01:2s")
    return Pause(probability=chance, mean_s=seconds("--pause mean", mean))


def read_fault(text: str) -> Fault:
    """Read --fault KIND:worker=RANK,at=TIME.

    Raises:
        UserError: it has another form.
    """
    match = re.fullmatch(r"\s*(\w+):worker=(\d+),at=([^,]+)", text)
    if match is None or match[1] not in _FAULTS:
        raise UserError(f"--fault {text}: must be kill:worker=RANK,at=TIME or restart:..., as in kill:worker=3,at=20s")
    return Fault("kill" if match[1] == "kill" else "restart", int(match[2]), seconds("--fault at", match[3]))


def _faults(where: str, tables: object) -> list[dict[str, object]]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UserError(f"{where}: fault must be a list of tables, as in [[fault]]")
    for table in tables:
        _only(where, table, {"kind", "worker", "at"}, "fault.")
    return [
        {
            "kind": table.get("kind"),
            "worker": table.get("worker"),
            "at_s": seconds(f"{where}: fault.at", table.get("at")),
        }
        for table in tables
    ]


def _quantity(what: str, text: object, units: dict[str, float], example: str) -> float:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].lower() not in units:
        names = ", ".join(units)
        raise UserError(f"{what} {text}: must be a number with a unit ({names}), as in {example}")
    return float(match[1]) * units[match[2].lower()]


def _table(where: str, table: dict[str, Any], key: str) -> dict[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise UserError(f"{where}: {key} must be a table, as in [{key}]")
    return value


def _rank(what: str, key: str) -> int:
    if not key.isdecimal():
        raise UserError(f"{what} {key}: must be the rank of a worker, as in 6 = 2.0")
    return int(key)


def _only(where: str, table: dict[str, Any], known: set[str], prefix: str) -> None:
    for key in table:
        if key not in known:
            raise unknown(f"key of {where}", prefix + key, {prefix + name for name in known})


def _positive(what: str, value: float | None) -> None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise UserError(f"cluster: {what} {value:g}: must be above 0")


def _not_negative(what: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise UserError(f"cluster: {what} {value:g}: must be at least 0")
