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
from dataclasses import dataclass
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
"""Keys that all runs of a suite share, and the type of their values."""

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

OWN = ("strategies", "seeds", "cluster", "clock", "tune_lr", "tune_seed", "tune_target")

_CHOICES: dict[str, Sequence[str]] = {
    "optimizer": ("sgd", "adamw"),
    "device": ("auto", "cpu", "cuda"),
    "clock": ("virtual", "real"),
    "wire": tuple(cluster.ELEMENT_BYTES),
    "transport": get_args(Transport),
}
_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Cell(NamedTuple):
    """A run of a suite, and the name of its folder."""

    name: str
    config: RunConfig


@dataclass(frozen=True)
class Tuning:
    """How the learning rate is chosen: each of `rates` on one seed, the fastest to `target` wins."""

    rates: tuple[float, ...]
    seed: int
    target: float


@dataclass(frozen=True)
class Suite:
    """A suite, checked and expanded.

    Attributes:
        name: the file's name without `.toml`.
        source: the file, as messages call it.
        sha256: digest of the file.
        clock: which clock it runs on.
        configs: a run each, all seeds of a group far apart: what was interrupted can be compared. With `tuning` their
            learning rate is not the one they run with.
        tuning: how the learning rate is chosen, or None.
    """

    name: str
    source: str
    sha256: str
    clock: Clock
    configs: tuple[RunConfig, ...]
    tuning: Tuning | None = None

    def cells(self, rates: Mapping[str, float] | None = None) -> list[Cell]:
        """The runs that are measured; `rates` are the tuned learning rates by `group_of`."""
        if rates is None:
            return _named(self.configs)
        return _named([msgspec.structs.replace(config, lr=rates[group_of(config)]) for config in self.configs])

    def tuning_cells(self) -> list[Cell]:
        """The runs that choose the learning rates; none without `tuning`."""
        if self.tuning is None:
            return []
        groups = {group_of(config): config for config in self.configs}
        return _named(
            [
                msgspec.structs.replace(config, seed=self.tuning.seed, lr=lr, target_accuracy=self.tuning.target)
                for config in groups.values()
                for lr in self.tuning.rates
            ]
        )


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


def group_of(config: RunConfig) -> str:
    """What tells the runs that share a learning rate from others: all but seed, learning rate and target."""
    return _key(msgspec.structs.replace(config, seed=0, lr=1.0, target_accuracy=None))


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
    with _said_of(source):
        return _suite(name, source, hashlib.sha256(data).hexdigest(), table, place, clock)


def _suite(
    name: str, source: str, sha256: str, table: Mapping[str, Any], place: Path | None, clock: Clock | None
) -> Suite:
    known = [*FIXED, *GRID, *CHANGES, *OWN]
    for key in table:
        if key not in known:
            raise unknown("key", key, known)
    asked = _choice("clock", table["clock"]) if "clock" in table else "virtual"
    seeds = _seeds(table.get("seeds", 1))
    tuning = _tuning(table, seeds)
    configs = tuple(_expand(table, seeds, place, tuning))
    virtual = (clock or asked) == "virtual"
    _check(configs, virtual=virtual)
    return Suite(
        name=name if clock in {None, asked} else f"{name}-{clock}",
        source=source,
        sha256=sha256,
        clock="virtual" if virtual else "real",
        configs=configs,
        tuning=tuning,
    )


def _expand(
    table: Mapping[str, Any], seeds: Sequence[int], place: Path | None, tuning: Tuning | None
) -> Iterator[RunConfig]:
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
    if tuning is not None:
        fixed["lr"] = tuning.rates[0]
    grid = {key: _listed(key, table[key], kind) for key, kind in GRID.items() if key in table}
    for wire in grid.get("wire", ()):
        _choice("wire", wire)
    strategies = _strategies(table)
    profiles = _profiles(table, place)
    n_cells = len(seeds) * len(profiles) * len(strategies) * math.prod(map(len, grid.values()))
    if n_cells > MOST_CELLS:
        raise UserError(f"asks for {n_cells:,} runs; at most {MOST_CELLS:,} make a suite")
    for seed, profile, *values in itertools.product(seeds, profiles, *grid.values()):
        for strategy, params in strategies:
            yield RunConfig(
                strategy=strategy,
                params=params,
                seed=seed,
                cluster=profile,
                **fixed,
                **dict(zip(grid, values, strict=True)),
            )


def _strategies(table: Mapping[str, Any]) -> list[tuple[str, dict[str, Value]]]:
    entries = table.get("strategies")
    if not isinstance(entries, list) or not entries:
        raise UserError('strategies must be a list, as in ["bsp", { name = "local-sgd", h = [4, 16] }]')
    found: list[tuple[str, dict[str, Value]]] = []
    for entry in entries:
        if isinstance(entry, str):
            found.append((entry, {}))
            continue
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise UserError(f'strategies: {entry}: must be a name, or a table as in {{ name = "local-sgd", h = 4 }}')
        choices = {key: _listed(f"strategies: {key}", value, None) for key, value in entry.items() if key != "name"}
        found += [
            (entry["name"], dict(zip(choices, values, strict=True))) for values in itertools.product(*choices.values())
        ]
    return found


def _profiles(table: Mapping[str, Any], place: Path | None) -> list[cluster.ClusterProfile]:
    entries = table.get("cluster", "none")
    entries = entries if isinstance(entries, list) else [entries]
    if not entries:
        raise UserError("cluster is an empty list; name a profile, or leave it out")
    common = {key: _typed(key, table[key], kind) for key, kind in CHANGES.items() if key in table}
    profiles = [_profile(entry, common, place) for entry in entries]
    for name, count in Counter(profile.name for profile in profiles).items():
        if count > 1:
            raise UserError(f'cluster: {name} is there {count} times; give each a name of its own, as in name = "slow"')
    return profiles


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
    beside = None if place is None else place / profile
    loaded = cluster.load_profile(str(beside) if beside is not None and beside.is_file() else profile)
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


def _tuning(table: Mapping[str, Any], seeds: Sequence[int]) -> Tuning | None:
    if "tune_lr" not in table:
        for key in ("tune_seed", "tune_target"):
            if key in table:
                raise UserError(f"{key} = {table[key]}: there is no tune_lr to go with it, as in tune_lr = [0.03, 0.1]")
        return None
    if "lr" in table:
        raise UserError("lr and tune_lr: the learning rate is either given or tuned; leave one of them out")
    seed = _typed("tune_seed", table.get("tune_seed", 1000), int)
    if seed in seeds:
        raise UserError(f"tune_seed = {seed}: is one of the seeds that are measured; tune on another")
    if "tune_target" not in table and "target_accuracy" not in table:
        raise UserError("tune_lr needs a test accuracy to get to: give tune_target, as in tune_target = 0.9")
    key = "tune_target" if "tune_target" in table else "target_accuracy"
    target = _typed(key, table[key], float)
    if not 0 < target <= 1:
        raise UserError(f"{key} = {target}: must lie above 0 and at most at 1")
    return Tuning(_rates(table["tune_lr"]), seed, target)


def _rates(value: object) -> tuple[float, ...]:
    rates = _listed("tune_lr", value, float)
    if len(set(rates)) < len(rates):
        raise UserError(f"tune_lr = {value}: a learning rate is there twice")
    for lr in rates:
        if not (lr > 0 and math.isfinite(lr)):
            raise UserError(f"tune_lr = {lr}: must be above 0")
    return tuple(rates)


def _check(configs: Iterable[RunConfig], *, virtual: bool) -> None:
    """Refuse what can be known to be wrong before it runs, and runs that are the same.

    Raises:
        UserError: says what.
    """
    from sapus_cli import registry  # noqa: PLC0415 - the strategies import torch

    built: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for config in configs:
        check_names(config.dataset, config.model)
        check_partition(config.partition, config.dataset)
        asked = json.dumps([config.strategy, config.params])
        if asked not in built:
            strategy = registry.build(config.strategy, config.params)
            built[asked] = {key: getattr(strategy, key) for key in registry.hyper_parameters(type(strategy))}
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
        key = _key(msgspec.structs.replace(config, params={}, cluster=unnamed)) + json.dumps(built[asked])
        if key in seen:
            raise UserError(f"{name_of(config)} is asked for twice; each run once, with defaults filled in")
        seen.add(key)


def name_of(config: RunConfig) -> str:
    """The name of a run's folder, by what its config says alone: what is as usual, is left out."""
    usual = {field.name: field.default for field in msgspec.structs.fields(RunConfig)}
    short = {"partition": "", "batch_size": "batch", "lr": "lr", "momentum": "momentum", "wire": ""}
    parts = [
        config.strategy,
        *(_worded(key, value) for key, value in config.params.items()),
        f"w{config.workers}",
        "" if config.cluster.name == "none" else config.cluster.name,
        *(_worded(word, getattr(config, key)) for key, word in short.items() if getattr(config, key) != usual[key]),
        f"s{config.seed}",
    ]
    name = "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", part).strip("-.") for part in parts if part)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]}_{_digest(config)}"


def _worded(key: str, value: Value) -> str:
    if isinstance(value, str | bool):
        return f"{key}-{value}".lower().strip("-")
    return f"{key}{value:g}".replace("e+", "e")


def _named(configs: Sequence[RunConfig]) -> list[Cell]:
    names = [name_of(config) for config in configs]
    count = Counter(names)
    return [
        Cell(name if count[name] == 1 else f"{name}_{_digest(config)}", config)
        for name, config in zip(names, configs, strict=True)
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
def _said_of(source: str) -> Iterator[None]:
    """Errors name the file, and call the keys by what they are in it: batch_size, not --batch-size."""
    try:
        yield
    except UserError as error:
        text = re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda match: match[1].replace("-", "_"), str(error))
        raise UserError(f"suite {source}: {text}") from error
