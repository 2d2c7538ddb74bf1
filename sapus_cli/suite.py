"""Suites: a TOML file that asks for a grid of runs, read and expanded. Pure; `docs/suites.md` is its manual.

Everything in the file is checked before anything runs, and a mistake is one line that names the file and the key.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import tomllib
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec

from sapus_cli import cluster
from sapus_cli.config import RunConfig, Transport
from sapus_cli.errors import UserError, unknown
from sapus_cli.workloads import check_names, check_partition, default_epochs, default_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Clock = Literal["virtual", "real"]
Value = bool | int | float | str

MOST_CELLS = 10_000
LONGEST_NAME = 150

FIXED: dict[str, type] = {
    "dataset": str,
    "model": str,
    "data_dir": str,
    "download": bool,
    "optimizer": str,
    "weight_decay": float,
    "device": str,
    "threads": int,
    "epochs": float,
    "steps": int,
    "seconds": float,
    "target_accuracy": float,
    "eval_every": float,
    "transport": str,
}
"""Keys that all runs of a suite, or of a part of it, share, and the type of their values."""

GRID: dict[str, type] = {
    "workers": int,
    "partition": str,
    "batch_size": int,
    "lr": float,
    "momentum": float,
    "wire": str,
}
"""Keys whose value may be a list."""

CHANGES: dict[str, type] = {"step_time": str, "link": str, "slow": str, "pause": str, "wire_scale": float}
"""Keys that change a cluster profile."""

OPTIONS: dict[str, type] = {"lr": float, "optimizer": str, "momentum": float, "weight_decay": float, "wire": str}
"""Options of the run that an entry of `strategies` may set for itself."""

COMPARE = ("compare_baseline", "compare_pivot")
"""How the runs of a suite are compared if nobody asks for anything else."""

TUNE = ("tune_lr", "tune_seed", "tune_target", "tune_on", "tune_seconds")
OWN = ("strategies", "seeds", "cluster", "clock", *TUNE, "compare_target", *COMPARE, "part")

TOP = ("clock", "tune_seed", "part", *COMPARE)
"""Keys that a part cannot have."""

_ONE_OF = (frozenset({"lr", "tune_lr"}), frozenset({"epochs", "steps", "seconds"}))
"""Keys that exclude each other: a part that has one of them inherits none of the others."""

_TOLD = ("dataset", "model", "optimizer", "weight_decay", "epochs", "steps", "seconds")
"""What is in the names of runs only if it is not the same for all runs of the suite."""

_CHOICES: dict[str, Sequence[str]] = {
    "optimizer": ("sgd", "adamw"),
    "device": ("auto", "cpu", "cuda"),
    "clock": ("virtual", "real"),
    "wire": tuple(cluster.ELEMENT_BYTES),
    "transport": get_args(Transport),
}
_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Cell(NamedTuple):
    """A run of a suite, the name of its folder, and the test accuracy that `compare` takes as target, if any."""

    name: str
    config: RunConfig
    target: float | None = None


@dataclass(frozen=True)
class Tuning:
    """How the learning rate is chosen: each of `rates` on one seed, the fastest to `target` wins.

    With `on` that is done on this cluster, for the runs on all clusters; without it on each run's own. With `seconds`
    that is the budget, in the place of the run's own.
    """

    rates: tuple[float, ...]
    seed: int
    target: float
    on: cluster.ClusterProfile | None = None
    seconds: float | None = None

    def configs(self, config: RunConfig) -> list[RunConfig]:
        """The runs that choose the learning rate of a run, in the order of the rates."""
        first = msgspec.structs.replace(
            config, cluster=self.on or config.cluster, seed=self.seed, target_accuracy=self.target
        )
        if self.seconds is not None:
            first = msgspec.structs.replace(first, epochs=None, steps=None, seconds=self.seconds)
        return [msgspec.structs.replace(first, lr=lr) for lr in self.rates]

    def group_of(self, config: RunConfig) -> str:
        """What tells the runs that share a learning rate with this one from others."""
        return f"{self.rates} {_key(self.configs(config)[0])}"


class Asked(NamedTuple):
    """A run that is asked for.

    Attributes:
        config: what it is. With `tuning` its learning rate is not the one it runs with.
        part: the part of the file that asks for it, from 1.
        tuning: how its learning rate is chosen, or None.
        target: the test accuracy that `compare` takes as target, or None.
    """

    config: RunConfig
    part: int = 1
    tuning: Tuning | None = None
    target: float | None = None

    def at(self, lr: float) -> Asked:
        """The same with a learning rate."""
        return self._replace(config=msgspec.structs.replace(self.config, lr=lr))


class Choice(NamedTuple):
    """A learning rate that is to be chosen: for which group, by which runs, and the accuracy they are to reach."""

    group: str
    cells: list[Cell]
    target: float


@dataclass(frozen=True)
class Suite:
    """A suite, checked and expanded.

    Attributes:
        name: the file's name without `.toml`.
        source: the file, as messages call it.
        sha256: digest of the file.
        clock: which clock it runs on.
        asked: the runs, all seeds of a group far apart: what was interrupted can be compared.
        n_parts: how many parts the file has, 0 if it has none.
        compare: what `compare` takes for its options `baseline` and `pivot` without them.
    """

    name: str
    source: str
    sha256: str
    clock: Clock
    asked: tuple[Asked, ...]
    n_parts: int = 0
    compare: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def told(self) -> tuple[str, ...]:
        """What its runs are told apart by in their names, beside what is always there where it is not as usual."""
        return tuple(key for key in _TOLD if len({getattr(one.config, key) for one in self.asked}) > 1)

    @cached_property
    def tunings(self) -> list[Tuning]:
        """How learning rates are chosen, each way once."""
        found: list[Tuning] = []
        for one in self.asked:
            if one.tuning is not None and one.tuning not in found:
                found.append(one.tuning)
        return found

    @cached_property
    def workloads(self) -> list[str]:
        """What the runs on each data set and model have in their names; empty if all have the same."""
        words = [_cleaned(_workload(one.config, self.told)) for one in self.asked]
        return [word for word in dict.fromkeys(words) if word]

    def cells(self, rates: Mapping[str, float] | None = None) -> list[Cell]:
        """The runs that are measured.

        Args:
            rates: the tuned learning rates by group; a run whose group lacks is left out. None: any of its rates.
        """
        found = []
        for one in self.asked:
            if one.tuning is None or rates is None:
                found.append(one)
            elif (group := one.tuning.group_of(one.config)) in rates:
                found.append(one.at(rates[group]))
        return _named(found, self.told)

    def choices(self) -> list[Choice]:
        """The learning rates that are to be chosen; two may have runs in common."""
        groups = {one.tuning.group_of(one.config): (one.tuning, one.config) for one in self.asked if one.tuning}
        tried = {group: tuning.configs(config) for group, (tuning, config) in groups.items()}
        configs = {_key(config): config for members in tried.values() for config in members}
        cells = dict(zip(configs, _named([Asked(config) for config in configs.values()], self.told), strict=True))
        return [
            Choice(group, [cells[_key(config)] for config in members], groups[group][0].target)
            for group, members in tried.items()
        ]

    def tuning_cells(self) -> list[Cell]:
        """The runs that choose the learning rates, each once."""
        return list({cell.name: cell for choice in self.choices() for cell in choice.cells}.values())

    def matching(self, only: Sequence[str]) -> list[Asked]:
        """The runs whose names match, with one or another of the learning rates that are tried for them.

        Raises:
            UserError: there is none.
        """
        found: set[int] = set()
        n_rates = max((len(tuning.rates) for tuning in self.tunings), default=1)
        for turn in range(n_rates):
            tried = [
                one.at(one.tuning.rates[turn % len(one.tuning.rates)]) if one.tuning else one for one in self.asked
            ]
            cells = _named(tried, self.told)
            found |= {place for place, cell in enumerate(cells) if matches(cell.name, only)}
        if not found:
            raise none_matches(only, cells)
        return [self.asked[place] for place in sorted(found)]


def matches(name: str, only: Sequence[str]) -> bool:
    """Whether a name contains one of the texts or patterns; without any, every name does."""
    return not only or any(fnmatchcase(name, f"*{text}*") for text in only)


def none_matches(only: Sequence[str], cells: Sequence[Cell]) -> UserError:
    """The error for a choice of runs that is empty."""
    said = " ".join(f"--only {text}" for text in only)
    return UserError(f"{said}: is in the name of none of {len(cells)} runs; they are called as in {cells[0].name}")


class Tried(NamedTuple):
    """How a run did with a learning rate.

    Attributes:
        lr: the learning rate.
        reached_s: seconds to the target, None if it was not reached.
        best_accuracy: the greatest test accuracy, if there was any evaluation.
        diverged: whether the run diverged.
    """

    lr: float
    reached_s: float | None
    best_accuracy: float | None
    diverged: bool = False


def best_rate(tried: Sequence[Tried]) -> float:
    """The learning rate that reached the target first; if none did, the one of the greatest accuracy.

    A run that diverged comes after all that did not, whatever it had reached. The first of equals wins.
    """

    def rank(one: Tried) -> tuple[bool, bool, float]:
        if one.reached_s is not None and not one.diverged:
            return (False, False, one.reached_s)
        return (one.diverged, True, -(one.best_accuracy or 0.0))

    return min(tried, key=rank).lr


def with_usual_lr(config: RunConfig) -> RunConfig:
    """The same with the learning rate that is not in names."""
    usual = {field.name: field.default for field in msgspec.structs.fields(RunConfig)}
    return msgspec.structs.replace(config, lr=usual["lr"])


def as_recorded(config: RunConfig) -> dict[str, Any]:
    """A config as it is read back from run.json."""
    recorded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return recorded


def shipped() -> dict[str, Any]:
    """The suites that ship: name -> file."""
    files = resources.files("experiments").iterdir()
    return {file.name.removesuffix(".toml"): file for file in files if file.name.endswith(".toml")}


def read(text: str, clock: Clock | None = None) -> Suite:
    """Read a suite from the path of a TOML file, or one that ships by its name.

    Args:
        text: the path, relative to the working directory, or the name; the path goes before the name.
        clock: which clock to run on, if not the one that the file says. The suite is then called NAME-CLOCK.

    Raises:
        UserError: there is no such suite, or anything in it is wrong.
    """
    ours = shipped()
    path = Path(text)
    if path.is_file():
        source, place, name = text, path.parent, path.stem
    elif text in ours:
        path, source, place, name = ours[text], f"{text}.toml", None, text
    else:
        raise unknown("suite", text, ours, "Or give the path of a TOML file.")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise UserError(f"suite {text}: its name becomes a folder; use letters, digits, '.', '_' and '-' in it")
    try:
        data = path.read_bytes()
        table = tomllib.loads(data.decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"suite {source}: {error}") from error
    with _said_of(f"suite {source}: "):
        return _suite(name, source, hashlib.sha256(data).hexdigest(), table, place, clock)


def _suite(
    name: str, source: str, sha256: str, table: Mapping[str, Any], place: Path | None, clock: Clock | None
) -> Suite:
    _check_keys(table)
    asked = _choice("clock", table["clock"]) if "clock" in table else "virtual"
    virtual = (clock or asked) == "virtual"
    parts = _parts(table)
    n_parts = len(parts) if "part" in table else 0
    rounds: list[list[list[Asked]]] = []
    seen: set[tuple[str, float]] = set()
    for number, part in enumerate(parts, 1):
        with _said_of(f"part {number}: " if n_parts else ""):
            rounds.append(_expand(part, number, place))
            _check(itertools.chain(*rounds[-1]), seen, virtual=virtual)
    runs = tuple(itertools.chain(*itertools.chain(*itertools.zip_longest(*rounds, fillvalue=[]))))
    _check_number(len(runs))
    for seed in {one.tuning.seed for one in runs if one.tuning} & {one.config.seed for one in runs}:
        raise UserError(f"tune_seed = {seed}: is one of the seeds that are measured; tune on another")
    return Suite(
        name=name if clock in {None, asked} else f"{name}-{clock}",
        source=source,
        sha256=sha256,
        clock="virtual" if virtual else "real",
        asked=runs,
        n_parts=n_parts,
        compare={key.removeprefix("compare_"): _typed(key, table[key], str) for key in COMPARE if key in table},
    )


def _check_keys(table: Mapping[str, Any], never: Sequence[str] = ()) -> None:
    known = [key for key in (*FIXED, *GRID, *CHANGES, *OWN) if key not in never]
    for key in table:
        if key in never:
            raise UserError(f"{key} is the same for all parts; give it above the first [[part]]")
        if key not in known:
            raise unknown("key", key, known)


def _parts(table: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The file itself, or each of its parts with what it inherits from the top."""
    if "part" not in table:
        return [table]
    parts = table["part"]
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise UserError("part must be a list of tables, each below a line [[part]]")
    for number, part in enumerate(parts, 1):
        with _said_of(f"part {number}: "):
            _check_keys(part, TOP)
    top = {key: value for key, value in table.items() if key != "part"}
    whole = [_whole(part, top) for part in parts]
    if "tune_lr" not in top and not any("tune_lr" in part for part in whole):
        _refuse_tuning(top)
    return whole


def _whole(part: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """A part with the keys of the top that it neither replaces nor rules out."""
    gone = {key for keys in _ONE_OF if keys & part.keys() for key in keys}
    if "tune_lr" not in part and ("tune_lr" in gone or "tune_lr" not in top):
        gone |= set(TUNE)
    return {key: value for key, value in top.items() if key not in gone} | dict(part)


def _expand(table: Mapping[str, Any], number: int, place: Path | None) -> list[list[Asked]]:
    """The runs of a part, a list for each seed."""
    seeds = _seeds(table.get("seeds", 1))
    profiles = _profiles(table, place)
    tuning = _tuning(table, profiles, place)
    target = _share("compare_target", table["compare_target"]) if "compare_target" in table else None
    fixed = _fixed(table)
    if tuning is not None:
        fixed["lr"] = tuning.rates[0]
    grid = {key: _listed(key, table[key], kind) for key, kind in GRID.items() if key in table}
    for wire in grid.get("wire", ()):
        _choice("wire", wire)
    entries = _strategies(table)
    n_each = sum(math.prod(len(values) for key, values in grid.items() if key not in one.options) for one in entries)
    _check_number(len(seeds) * len(profiles) * n_each)
    rounds = []
    for seed in seeds:
        runs = []
        for profile, *values in itertools.product(profiles, *grid.values()):
            given = dict(zip(grid, values, strict=True))
            for strategy, params, options in entries:
                # What an entry sets itself takes the place of a whole list: only once, with the first of it.
                if any(given[key] != grid[key][0] for key in options.keys() & grid.keys()):
                    continue
                what = {"strategy": strategy, "params": params, "seed": seed, "cluster": profile}
                config = RunConfig(**what, **{**fixed, **given, **options})
                runs.append(Asked(config, number, None if "lr" in options else tuning, target))
        rounds.append(runs)
    return rounds


def _fixed(table: Mapping[str, Any]) -> dict[str, Any]:
    fixed = {key: _typed(key, table[key], kind) for key, kind in FIXED.items() if key in table}
    for key in ("optimizer", "device", "transport"):
        if key in fixed:
            _choice(key, fixed[key])
    dataset = fixed.setdefault("dataset", "digits")
    fixed.setdefault("model", default_model(dataset))
    if "eval_every" in fixed:
        fixed["eval_every_s"] = fixed.pop("eval_every")
    if not fixed.keys() & {"epochs", "steps", "seconds"}:
        fixed["epochs"] = default_epochs(dataset)
    return fixed


def _check_number(n_runs: int) -> None:
    if n_runs > MOST_CELLS:
        raise UserError(f"asks for {n_runs:,} runs; at most {MOST_CELLS:,} make a suite")


class _Entry(NamedTuple):
    """A strategy with its hyper-parameters, and the options of the run that it sets for itself."""

    strategy: str
    params: dict[str, Value]
    options: dict[str, Value]


def _strategies(table: Mapping[str, Any]) -> list[_Entry]:
    entries = table.get("strategies")
    if not isinstance(entries, list) or not entries:
        raise UserError('strategies must be a list, as in ["bsp", { name = "local-sgd", h = [4, 16] }]')
    found: list[_Entry] = []
    for entry in entries:
        if isinstance(entry, str):
            found.append(_Entry(entry, {}, {}))
            continue
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise UserError(f'strategies: {entry}: must be a name, or a table as in {{ name = "local-sgd", h = 4 }}')
        found += _combinations(entry["name"], {key: value for key, value in entry.items() if key != "name"})
    return found


def _combinations(strategy: str, table: Mapping[str, Any]) -> Iterator[_Entry]:
    own = _options(strategy, table)
    choices = {key: _listed(f"strategies: {key}", value, own.get(key)) for key, value in table.items()}
    for key in own.keys() & _CHOICES.keys():
        for value in choices[key]:
            _choice(key, value)
    for values in itertools.product(*choices.values()):
        given = dict(zip(choices, values, strict=True))
        yield _Entry(
            strategy,
            {key: value for key, value in given.items() if key not in own},
            {key: value for key, value in given.items() if key in own},
        )


def _options(strategy: str, table: Mapping[str, Any]) -> dict[str, type]:
    """Which keys of an entry are options of the run: a hyper-parameter of the same name goes first."""
    meant = {key: kind for key, kind in OPTIONS.items() if key in table}
    if not meant:
        return {}
    from sapus_cli import registry  # noqa: PLC0415 - the strategies import torch

    params = registry.hyper_parameters(registry.strategy_class(strategy))
    return {key: kind for key, kind in meant.items() if key not in params}


def _profiles(table: Mapping[str, Any], place: Path | None) -> list[cluster.ClusterProfile]:
    entries = table.get("cluster", "none")
    entries = entries if isinstance(entries, list) else [entries]
    if not entries:
        raise UserError("cluster is an empty list; name a profile, or leave it out")
    profiles = [_profile(entry, _common(table), place) for entry in entries]
    for name, count in Counter(profile.name for profile in profiles).items():
        if count > 1:
            raise UserError(f'cluster: {name} is there {count} times; give each a name of its own, as in name = "slow"')
    return profiles


def _common(table: Mapping[str, Any]) -> dict[str, Any]:
    """The changes to all profiles."""
    return {key: _typed(key, table[key], kind) for key, kind in CHANGES.items() if key in table}


def _file(name: str, place: Path | None) -> Path:
    """Where a profile's file would be."""
    return Path(name) if place is None else place / name


def _profile(entry: object, common: Mapping[str, Any], place: Path | None) -> cluster.ClusterProfile:
    if isinstance(entry, str):
        entry = {"profile": entry}
    if not isinstance(entry, dict):
        raise UserError(f'cluster: {entry}: must be a name, or a table as in {{ profile = "none", link = "1gbit" }}')
    kinds = {"name": str, "profile": str, **CHANGES}
    for key in entry:
        if key not in kinds:
            raise unknown("key of cluster", key, kinds)
    own = {key: _typed(f"cluster: {key}", value, kinds[key]) for key, value in entry.items()}
    name, profile = own.pop("name", None), own.pop("profile", "none")
    beside = _file(profile, place)
    loaded = cluster.load_profile(str(beside) if beside.is_file() else profile)
    changed = cluster.changed(loaded, **{**common, **own})
    if name is None and own:
        name = " ".join([*([] if profile == "none" else [loaded.name]), *(f"{key}={own[key]}" for key in own)])
    return changed if name is None else msgspec.structs.replace(changed, name=name)


def _seeds(value: object) -> list[int]:
    if isinstance(value, list):
        seeds: list[int] = _listed("seeds", value, int)
        if len(set(seeds)) < len(seeds):
            raise UserError(f"seeds = {value}: a seed is there twice")
        return seeds
    count: int = _typed("seeds", value, int)
    if not 1 <= count <= MOST_CELLS:
        raise UserError(f"seeds = {count}: must be a number of runs from 1 to {MOST_CELLS}, or a list of seeds")
    return list(range(count))


def _tuning(table: Mapping[str, Any], profiles: Sequence[cluster.ClusterProfile], place: Path | None) -> Tuning | None:
    if "tune_lr" not in table:
        _refuse_tuning(table)
        return None
    if "lr" in table:
        raise UserError("lr and tune_lr: the learning rate is either given or tuned; leave one of them out")
    seed = _typed("tune_seed", table.get("tune_seed", 1000), int)
    if "tune_target" not in table and "target_accuracy" not in table:
        raise UserError("tune_lr needs a test accuracy to get to: give tune_target, as in tune_target = 0.9")
    key = "tune_target" if "tune_target" in table else "target_accuracy"
    on = _tuned_on(table, profiles, place) if "tune_on" in table else None
    seconds = _typed("tune_seconds", table["tune_seconds"], float) if "tune_seconds" in table else None
    if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
        raise UserError(f"tune_seconds = {seconds}: must be above 0")
    return Tuning(_rates(table["tune_lr"]), seed, _share(key, table[key]), on, seconds)


def _refuse_tuning(table: Mapping[str, Any]) -> None:
    """Refuse keys of tuning where nothing is tuned."""
    for key in TUNE:
        if key in table:
            raise UserError(f"{key} = {table[key]}: there is no tune_lr to go with it, as in tune_lr = [0.03, 0.1]")


def _tuned_on(
    table: Mapping[str, Any], profiles: Sequence[cluster.ClusterProfile], place: Path | None
) -> cluster.ClusterProfile:
    """The cluster of a name, with or without the `, changed` that keys for all profiles put behind it.

    It may also be a profile on which this part measures nothing.
    """
    name = _typed("tune_on", table["tune_on"], str)
    for profile in profiles:
        if profile.name in {name, f"{name}, changed"}:
            return profile
    if name in cluster.shipped_profiles() or _file(name, place).is_file():
        return _profile(name, _common(table), place)
    raise unknown("cluster in tune_on", name, [profile.name for profile in profiles])


def _share(key: str, value: object) -> float:
    share: float = _typed(key, value, float)
    if not 0 < share <= 1:
        raise UserError(f"{key} = {share}: must lie above 0 and at most at 1")
    return share


def _rates(value: object) -> tuple[float, ...]:
    rates = _listed("tune_lr", value, float)
    if len(set(rates)) < len(rates):
        raise UserError(f"tune_lr = {value}: a learning rate is there twice")
    for lr in rates:
        if not (lr > 0 and math.isfinite(lr)):
            raise UserError(f"tune_lr = {lr}: must be above 0")
    return tuple(rates)


def _check(asked: Iterable[Asked], seen: set[tuple[str, float]], *, virtual: bool) -> None:
    """Refuse what can be known to be wrong before it runs, and runs that are the same.

    Args:
        asked: the runs.
        seen: what there was before them; these are added. A run that is tuned may become that of each of its rates.
        virtual: whether they run in virtual time.

    Raises:
        UserError: says what.
    """
    from sapus_cli import registry  # noqa: PLC0415 - the strategies import torch

    built: dict[str, dict[str, Any]] = {}
    for config, _, tuning, _ in asked:
        check_names(config.dataset, config.model)
        check_partition(config.partition, config.dataset)
        wanted = json.dumps([config.strategy, config.params])
        if wanted not in built:
            strategy = registry.build(config.strategy, config.params)
            built[wanted] = {key: getattr(strategy, key) for key in registry.hyper_parameters(type(strategy))}
        if virtual and config.cluster.step_s is None:
            raise UserError(
                f"cluster {config.cluster.name}: virtual time needs to know how long a step takes; give a profile, or "
                'step_time, as in step_time = "50ms"'
            )
        if virtual and config.transport != "tcp":
            raise UserError(f"transport = {_shown(config.transport)}: nothing travels in virtual time; leave it out")
        if virtual and config.workers > cluster.MOST_WORKERS:
            raise UserError(f"workers = {config.workers}: at most {cluster.MOST_WORKERS} workers are simulated")
        unnamed = msgspec.structs.replace(config.cluster, name="", description="")
        key = _key(msgspec.structs.replace(config, params={}, cluster=unnamed, lr=1.0)) + json.dumps(built[wanted])
        twins = {(key, lr) for lr in (tuning.rates if tuning else [config.lr])}
        if twins & seen:
            raise UserError(f"{name_of(config)} is asked for twice; each run once, with defaults filled in")
        seen |= twins


def name_of(config: RunConfig, told: Sequence[str] = ()) -> str:
    """The name of a run's folder, by what its config says alone: what is as usual, is left out.

    Args:
        config: the run.
        told: what is in the name beside that, of data set, model, optimizer, weight decay and budget.
    """
    usual = {field.name: field.default for field in msgspec.structs.fields(RunConfig)}
    short = {"partition": "", "batch_size": "batch", "lr": "lr", "momentum": "momentum", "wire": ""}
    more = {"optimizer": "", "weight_decay": "wd", "epochs": "epochs", "steps": "steps", "seconds": "seconds"}
    parts = [
        config.strategy,
        *(_worded(key, value) for key, value in config.params.items()),
        _workload(config, told),
        f"w{config.workers}",
        "" if config.cluster.name == "none" else config.cluster.name,
        *(_worded(word, getattr(config, key)) for key, word in short.items() if getattr(config, key) != usual[key]),
        *(
            _worded(word, value)
            for key, word in more.items()
            if key in told and (value := getattr(config, key)) is not None
        ),
        f"s{config.seed}",
    ]
    name = "_".join(_cleaned(part) for part in parts if part)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]}_{_digest(config)}"


def _workload(config: RunConfig, told: Sequence[str]) -> str:
    return "-".join(getattr(config, key) for key in ("dataset", "model") if key in told)


def _cleaned(word: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", word).strip("-.")


def _worded(key: str, value: Value) -> str:
    if isinstance(value, str | bool):
        return f"{key}-{value}".lower().strip("-")
    return f"{key}{value:g}".replace("e+", "e")


def _named(asked: Sequence[Asked], told: Sequence[str]) -> list[Cell]:
    names = [name_of(one.config, told) for one in asked]
    count = Counter(names)
    return [
        Cell(name if count[name] == 1 else f"{name}_{_digest(one.config)}", one.config, one.target)
        for name, one in zip(names, asked, strict=True)
    ]


def _key(config: RunConfig) -> str:
    return json.dumps(msgspec.to_builtins(config, str_keys=True), sort_keys=True)


def _digest(config: RunConfig) -> str:
    return hashlib.sha256(_key(config).encode()).hexdigest()[:8]


def _typed(key: str, value: Any, kind: type) -> Any:
    """A value of the type that the key has; a whole number is a number too."""
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise UserError(f"{key} = {_shown(value)}: must be {_WANTED[kind]}")
    return value


def _listed(key: str, value: object, kind: type | None) -> list[Any]:
    """A value or a list of them; without `kind` of any simple type."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise UserError(f"{key} is an empty list; give a value, or leave it out")
    for one in values:
        if type(one) not in _WANTED:
            raise UserError(f"{key} = {_shown(one)}: must be {_WANTED[kind] if kind else 'a number or text'}")
    return list(values) if kind is None else [_typed(key, one, kind) for one in values]


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _choice(key: str, value: object) -> str:
    text: str = _typed(key, value, str)
    if text not in _CHOICES[key]:
        raise unknown(key, text, _CHOICES[key])
    return text


@contextmanager
def _said_of(where: str) -> Iterator[None]:
    """Errors begin with where they are, and call the keys by what they are in it: batch_size, not --batch-size."""
    try:
        yield
    except UserError as error:
        text = re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda match: match[1].replace("-", "_"), str(error))
        raise UserError(f"{where}{text}") from error
