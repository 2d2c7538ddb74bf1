"""Suites: what a TOML file asks for, what is refused, how the learning rate is chosen, and how the command goes on."""

from __future__ import annotations

import json
import re
import shutil
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from processes import Background, sapus, start

from sapus_cli import suite
from sapus_cli.analysis import find_runs
from sapus_cli.config import RunConfig
from sapus_cli.drivers.suite import Shelf
from sapus_cli.errors import UserError
from sapus_cli.suite import Cell, Suite, Tried, best_rate, read
from sapus_cli.traces import read_run, write_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inside import Inside

BASE = """
model = "mlp"
steps = 6
workers = 2
step_time = "50ms"
eval_every = 0.1
"""


def make(folder: Path, text: str, name: str = "my") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def asked(tmp_path: Path, text: str) -> Suite:
    return read(str(make(tmp_path, text)))


def names(tmp_path: Path, text: str) -> list[str]:
    return [cell.name for cell in asked(tmp_path, text).cells()]


# --- What it asks for ---


def test_a_grid_is_every_combination_with_seeds_outermost(tmp_path: Path) -> None:
    text = """
        steps = 10
        seeds = [3, 5]
        workers = [4, 8]
        lr = [0.1, 0.3]
        cluster = ["8xgpu-10g", "8xgpu-1g"]
        strategies = ["bsp", { name = "local-sgd", h = [1, 4, 16] }]
    """
    cells = asked(tmp_path, text).cells()
    assert len(cells) == 2 * 2 * 2 * 2 * (1 + 3)
    assert len({cell.name for cell in cells}) == len(cells)
    assert [cell.config.seed for cell in cells] == [3] * 32 + [5] * 32
    assert [cell.name for cell in cells[:5]] == [
        "bsp_w4_8xgpu-10g_s3",
        "local-sgd_h1_w4_8xgpu-10g_s3",
        "local-sgd_h4_w4_8xgpu-10g_s3",
        "local-sgd_h16_w4_8xgpu-10g_s3",
        "bsp_w4_8xgpu-10g_lr0.3_s3",
    ]
    assert cells[-1].config.params == {"h": 16}
    assert (cells[-1].config.lr, cells[-1].config.workers, cells[-1].config.cluster.name) == (0.3, 8, "8xgpu-1g")


def test_what_is_left_out_is_as_in_the_command_line(tmp_path: Path) -> None:
    (cell,) = asked(tmp_path, 'strategies = ["asp"]\nstep_time = "50ms"').cells()
    config = cell.config
    assert (config.dataset, config.model, config.epochs, config.workers, config.seed) == ("digits", "cnn", 120.0, 8, 0)
    assert (config.cluster.name, config.cluster.step_s) == ("custom", 0.05)
    (cell,) = asked(tmp_path, 'strategies = ["asp"]\nstep_time = "50ms"\ndataset = "pydoc"\nepochs = 1').cells()
    assert cell.config.model == "gpt"


def test_names_say_what_is_not_as_usual(tmp_path: Path) -> None:
    text = """
        cluster = { profile = "8xgpu-10g", link = "1gbit,0.5ms" }
        partition = "dirichlet:0.3"
        batch_size = 64
        momentum = 0.9
        wire = "bfloat16"
        strategies = [{ name = "sapus-weighted", weighting = "loss-share", rho = 0.5, overlap = false }]
    """
    (name,) = names(tmp_path, text)
    strategy, cluster = "sapus-weighted_weighting-loss-share_rho0.5_overlap-false", "8xgpu-10g-link-1gbit-0.5ms"
    assert name == f"{strategy}_w8_{cluster}_dirichlet-0.3_batch64_momentum0.9_bfloat16_s0"


def test_a_cluster_may_be_changed_for_all_or_in_one_entry(tmp_path: Path) -> None:
    text = """
        steps = 1
        wire_scale = 150
        strategies = ["asp"]
        cluster = [
          "8xgpu-10g",
          { profile = "8xgpu-10g", link = "none,0.1ms" },
          { name = "slow", profile = "8xgpu-1g", slow = "6:2x", wire_scale = 7 },
          { step_time = "10ms", pause = "0.01:2s" },
        ]
    """
    plain, unlimited, slow, own = (cell.config.cluster for cell in asked(tmp_path, text).cells())
    assert (plain.name, plain.wire_scale) == ("8xgpu-10g, changed", 150)
    assert (unlimited.name, unlimited.link.bytes_per_s, unlimited.link.latency_s) == (
        "8xgpu-10g link=none,0.1ms",
        None,
        0.0001,
    )
    assert (slow.name, slow.wire_scale, slow.slow) == ("slow", 7, {6: 2.0})
    assert (own.name, own.step_s, own.wire_scale) == ("step_time=10ms pause=0.01:2s", 0.01, 150)


def test_a_profile_is_looked_for_beside_the_suite(tmp_path: Path) -> None:
    make(tmp_path / "suites", '[step]\nmean = "7ms"', "mine")
    path = make(tmp_path / "suites", 'steps = 1\nstrategies = ["asp"]\ncluster = "mine.toml"')
    assert read(str(path)).cells()[0].config.cluster.step_s == 0.007


def test_a_path_goes_before_what_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read("quick").name == "quick"
    (tmp_path / "quick").write_text(f'{BASE}strategies = ["asp"]')
    assert len(read("quick").asked) == 1


@pytest.mark.parametrize("name", ["quick", "scaling", "bandwidth", "heterogeneity", "noniid", "wire", "wire-mnist5k"])
def test_what_ships_can_be_read(name: str) -> None:
    assert name in suite.shipped()
    cells = read(name).cells()
    assert {cell.config.strategy for cell in cells} >= {"bsp", "sapus"}
    assert {cell.config.seed for cell in cells} == set(range(5 if name == "wire" else 3))


def test_the_other_clock_has_a_folder_of_its_own(tmp_path: Path) -> None:
    path = make(tmp_path, f'{BASE}strategies = ["asp"]')
    assert (read(str(path), "real").name, read(str(path), "real").clock) == ("my-real", "real")
    assert read(str(path), "virtual").name == "my"
    real = make(tmp_path, 'steps = 1\nclock = "real"\nstrategies = ["asp"]', "really")
    assert (read(str(real)).name, read(str(real)).clock) == ("really", "real")


PARTS = """
steps = 10
seeds = 2
workers = 2
step_time = "50ms"
strategies = ["bsp", "asp"]
[[part]]
model = "mlp"
[[part]]
dataset = "mnist5k"
model = "lenet5"
seconds = 5
optimizer = "adamw"
lr = 0.001
seeds = 3
strategies = ["bsp"]
"""


def test_parts_inherit_from_the_top_and_run_seed_by_seed(tmp_path: Path) -> None:
    found = asked(tmp_path, PARTS)
    assert [cell.name for cell in found.cells()] == [
        *(f"{name}_digits-mlp_w2_custom_sgd_steps10_s0" for name in ("bsp", "asp")),
        "bsp_mnist5k-lenet5_w2_custom_lr0.001_adamw_seconds5_s0",
        *(f"{name}_digits-mlp_w2_custom_sgd_steps10_s1" for name in ("bsp", "asp")),
        "bsp_mnist5k-lenet5_w2_custom_lr0.001_adamw_seconds5_s1",
        "bsp_mnist5k-lenet5_w2_custom_lr0.001_adamw_seconds5_s2",
    ]
    assert [one.part for one in found.asked] == [1, 1, 2, 1, 1, 2, 2]
    assert found.workloads == ["digits-mlp", "mnist5k-lenet5"]
    last = found.asked[-1].config
    assert (last.model, last.steps, last.seconds, last.cluster.step_s) == ("lenet5", None, 5.0, 0.05)


def test_what_all_parts_have_is_in_no_name(tmp_path: Path) -> None:
    whole = f'{BASE}optimizer = "adamw"\nweight_decay = 0.1\nseeds = 2\nworkers = [2, 4]\nstrategies = ["asp"]'
    parts = f"{whole.replace('workers = 2', '').replace('workers = [2, 4]', '')}\n[[part]]\nworkers = [2, 4]"
    text = whole.replace("workers = 2\n", "")
    assert asked(tmp_path, parts).cells() == asked(tmp_path, text).cells()
    assert asked(tmp_path, f"{parts}\n[[part]]\nworkers = 8").told == ()
    assert asked(tmp_path, f"{parts}\n[[part]]\nworkers = 8\nweight_decay = 0").told == ("weight_decay",)


def test_a_strategy_may_set_options_of_its_own(tmp_path: Path) -> None:
    text = """
        steps = 10
        step_time = "50ms"
        momentum = [0, 0.9]
        lr = 0.2
        strategies = ["asp", { name = "local-sgd", h = [2, 4], momentum = 0.5, lr = [0.1, 0.3], wire = "float16" }]
    """
    runs = [one.config for one in asked(tmp_path, text).asked]
    assert [(run.strategy, run.params, run.momentum, run.lr, run.wire) for run in runs] == [
        ("asp", {}, 0.0, 0.2, "float32"),
        *(("local-sgd", {"h": h}, 0.5, lr, "float16") for h in (2, 4) for lr in (0.1, 0.3)),
        ("asp", {}, 0.9, 0.2, "float32"),
    ]
    text = 'strategies = ["asp", { name = "asp", optimizer = "adamw", weight_decay = [0, 0.01] }]'
    assert names(tmp_path, f"{BASE}{text}") == [
        "asp_w2_custom_sgd_wd0_s0",
        "asp_w2_custom_adamw_wd0_s0",
        "asp_w2_custom_adamw_wd0.01_s0",
    ]


def test_a_hyper_parameter_goes_before_an_option_of_the_same_name(tmp_path: Path) -> None:
    text = 'strategies = [{ name = "diloco", momentum = 0.5, lr = 0.2 }]'
    (one,) = asked(tmp_path, BASE + text).asked
    assert (one.config.params, one.config.momentum, one.config.lr) == ({"momentum": 0.5}, 0.0, 0.2)


def test_the_target_of_compare_is_that_of_the_part(tmp_path: Path) -> None:
    text = f'{BASE}strategies = ["asp"]\n'
    assert [cell.target for cell in asked(tmp_path, text).cells()] == [None]
    text += "compare_target = 0.93\n[[part]]\n[[part]]\nworkers = 4\ncompare_target = 1"
    assert [cell.target for cell in asked(tmp_path, text).cells()] == [0.93, 1.0]


def test_how_its_runs_are_compared(tmp_path: Path) -> None:
    text = f'{BASE}strategies = ["asp"]\ncompare_baseline = "ssp,dssp"\n'
    assert asked(tmp_path, text).compare == {"baseline": "ssp,dssp"}
    assert asked(tmp_path, f'{text}compare_pivot = "cluster"').compare == {"baseline": "ssp,dssp", "pivot": "cluster"}


def test_only_what_matches_by_one_of_its_learning_rates(tmp_path: Path) -> None:
    text = 'seeds = 2\ntune_lr = [0.03, 0.1]\ntune_target = 0.9\nstrategies = ["bsp", { name = "asp", lr = 0.3 }]'
    found = asked(tmp_path, BASE + text)

    def chosen(*only: str) -> list[tuple[str, int]]:
        return [(one.config.strategy, one.config.seed) for one in found.matching(only)]

    assert chosen() == [("bsp", 0), ("asp", 0), ("bsp", 1), ("asp", 1)]
    assert chosen("bsp") == chosen("custom_lr0.03") == [("bsp", 0), ("bsp", 1)]
    assert chosen("custom_s0") == [("bsp", 0)], "0.1 is not in names"
    assert chosen("w2*s1") == [("bsp", 1), ("asp", 1)]
    assert chosen("lr0.3", "bsp*0.03*s0") == [("bsp", 0), ("asp", 0), ("asp", 1)]
    with pytest.raises(UserError, match=r"^--only ssp --only lr0.2: is in the name of none of 4 runs; they are called"):
        found.matching(["ssp", "lr0.2"])


# --- What is refused ---

TUNED = 'tune_target = 0.9\nstrategies = ["asp"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strategies = [", "Invalid value (at end of document)"),
        ("", "strategies must be a list"),
        ("strategies = []", "strategies must be a list"),
        ("strategies = [3]", "strategies: 3: must be a name, or a table"),
        ("strategies = [{ h = 3 }]", "must be a name, or a table"),
        ('strategies = ["asb"]', "unknown strategy 'asb'; did you mean asp"),
        ('strategies = [{ name = "asp", h = 3 }]', "unknown hyper-parameter of asp 'h'"),
        ('strategies = [{ name = "local-sgd", h = [] }]', "strategies: h is an empty list"),
        ('strategies = [{ name = "local-sgd", h = 0 }]', "strategy local-sgd: h = 0: must be"),
        (
            'strategies = [{ name = "local-sgd", h = [{ a = 1 }] }]',
            "strategies: h = {'a': 1}: must be a number or text",
        ),
        (
            'strategies = [{ name = "local-sgd", h = [4, 16] }, "local-sgd"]',
            "local-sgd_w2_custom_s0 is asked for twice",
        ),
        ('strategies = ["asp"]\nworker = 4', "unknown key 'worker'; did you mean workers"),
        ('strategies = ["asp"]\nseeds = 0', "seeds = 0: must be a number of runs from 1"),
        ('strategies = ["asp"]\nseeds = [1, 1]', "seeds = [1, 1]: a seed is there twice"),
        ('strategies = ["asp"]\nseeds = [-1]', "seed -1: must be a whole number from 0"),
        ('strategies = ["asp"]\nseeds = 1.5', "seeds = 1.5: must be a whole number"),
        ('strategies = ["asp"]\nseeds = true', "seeds = True: must be a whole number"),
        ('strategies = ["asp"]\nwire = ["float32", "int8"]', "int8"),
        ('strategies = ["asp"]\nwire = 16', "wire = 16: must be text"),
        ('strategies = ["asp"]\ntransport = "carrier pigeon"', "carrier pigeon"),
        ('strategies = ["asp"]\ntransport = "shm"', 'transport = "shm": nothing travels in virtual time; leave it out'),
        ('strategies = ["asp"]\nlr = "0.1"', 'lr = "0.1": must be a number'),
        ('strategies = ["asp"]\nlr = [0.1, -1]', "lr -1: must be a number above 0"),
        ('strategies = ["asp"]\nbatch_size = 0', "batch_size 0: must be a whole number from 1"),
        ('strategies = ["asp"]\nbatch_size = []', "batch_size is an empty list"),
        (
            'strategies = ["asp"]\nepochs = 3',
            "give one of epochs, steps and seconds as the budget, not epochs and steps",
        ),
        ('strategies = ["asp"]\noptimizer = "adam"', "unknown optimizer 'adam'; did you mean adamw"),
        ('strategies = ["asp"]\ndevice = "gpu"', "unknown device 'gpu'"),
        ('strategies = ["asp"]\nclock = "wall"', "unknown clock 'wall'"),
        ('strategies = ["asp"]\ndataset = "digit"', "unknown data set 'digit'"),
        ('strategies = ["asp"]\npartition = "sorted"', "unknown partition 'sorted'"),
        ('strategies = ["asp"]\ntarget_accuracy = 95', "target_accuracy 95: must be a number above 0 and at most 1"),
        ('strategies = ["asp"]\nlink = "fast"', "link rate fast: must be a number with a unit"),
        ('strategies = ["asp"]\nslow = "7:2x"', "cluster: slow names worker 7"),
        ('strategies = ["asp"]\ncluster = "8xgpu"', "unknown cluster '8xgpu'"),
        ('strategies = ["asp"]\ncluster = 8', "cluster: 8: must be a name, or a table"),
        ('strategies = ["asp"]\ncluster = []', "cluster is an empty list"),
        ('strategies = ["asp"]\ncluster = [{ rate = "1gbit" }]', "unknown key of cluster 'rate'"),
        ('strategies = ["asp"]\ncluster = ["8xgpu-1g", "8xgpu-1g"]', "cluster: 8xgpu-1g, changed is there 2 times"),
        ('strategies = ["asp"]\ncluster = [{ link = 1 }]', "cluster: link = 1: must be text"),
        ('strategies = ["asp"]\nseeds = 10000\nlr = [1, 2]', "asks for 20,000 runs; at most 10,000"),
        (f"{TUNED}tune_lr = [0.1]\ntune_seed = 0", "tune_seed = 0: is one of the seeds that are measured"),
        (f"{TUNED}tune_lr = [0.1, 0.1]", "tune_lr = [0.1, 0.1]: a learning rate is there twice"),
        (f"{TUNED}tune_lr = []", "tune_lr is an empty list"),
        (f"{TUNED}tune_lr = [0.1, 0]", "tune_lr = 0.0: must be above 0"),
        (f"{TUNED}tune_lr = [0.1]\nlr = 0.1", "the learning rate is either given or tuned"),
        (TUNED, "tune_target = 0.9: there is no tune_lr"),
        ('strategies = ["asp"]\ntune_lr = [0.1]', "tune_lr needs a test accuracy to get to"),
        ('strategies = ["asp"]\ntune_lr = [0.1]\ntune_target = 90', "tune_target = 90.0: must lie above 0"),
        (f'{TUNED}tune_lr = [0.1]\ntune_on = "slow"', "unknown cluster in tune_on 'slow'. Valid: custom."),
        (f"{TUNED}tune_lr = [0.1]\ntune_on = 1", "tune_on = 1: must be text"),
        (f"{TUNED}tune_lr = [0.1]\ntune_seconds = 0", "tune_seconds = 0.0: must be above 0"),
        ('strategies = ["asp"]\ntune_on = "custom"', "tune_on = custom: there is no tune_lr"),
        ('strategies = ["asp"]\ncompare_target = 93', "compare_target = 93.0: must lie above 0 and at most at 1"),
        ('strategies = ["asp"]\ncompare_pivot = 1', "compare_pivot = 1: must be text"),
        (
            'strategies = ["asp"]\n[[part]]\ncompare_baseline = "bsp"',
            "compare_baseline is the same for all parts",
        ),
        ('strategies = ["asp"]\ncompare_target = "93%"', 'compare_target = "93%": must be a number'),
        ('strategies = [{ name = "asp", lr = "x" }]', 'strategies: lr = "x": must be a number'),
        ('strategies = [{ name = "asp", wire = ["int8"] }]', "unknown wire 'int8'"),
        ('strategies = [{ name = "asb", lr = 1 }]', "unknown strategy 'asb'"),
        ('momentum = 0.9\nstrategies = [{ name = "asp", optimizer = "adamw" }]', "adamw has no such momentum"),
        (
            'tune_lr = [0.1, 0.3]\ntune_target = 0.9\nstrategies = ["asp", { name = "asp", lr = 0.3 }]',
            "asp_w2_custom_lr0.3_s0 is asked for twice",
        ),
        (
            f"{TUNED}tune_lr = [0.1]\n[[part]]\n[[part]]\nlr = 1\nseeds = [1000]",
            "tune_seed = 1000: is one of the seeds",
        ),
        ("part = []", "part must be a list of tables, each below a line [[part]]"),
        ("[part]\nworkers = 4", "part must be a list of tables"),
        ("[[part]]", "part 1: strategies must be a list"),
        ('[[part]]\nstrategies = ["asp"]\n[[part]]\nworker = 4', "part 2: unknown key 'worker'; did you mean workers"),
        ('[[part]]\nclock = "real"', "part 1: clock is the same for all parts; give it above the first [[part]]"),
        ("[[part]]\ntune_seed = 1", "part 1: tune_seed is the same for all parts"),
        ('strategies = ["asp"]\n[[part]]\n[[part]]\nlr = -1', "part 2: lr -1: must be a number above 0"),
        ('strategies = ["asp"]\n[[part]]\n[[part]]\nseeds = [1, 0]', "part 2: asp_w2_custom_s0 is asked for twice"),
        ('strategies = ["asp"]\nlr = [1, 2]\n[[part]]\nseeds = 5000\n[[part]]\nlr = 3', "asks for 10,001 runs"),
        ('strategies = ["asp"]\ntune_target = 0.9\n[[part]]', "tune_target = 0.9: there is no tune_lr"),
        (f"{TUNED}lr = 0.1\ntune_lr = [0.1]\n[[part]]", "part 1: lr and tune_lr: the learning rate is either given"),
        (
            f'{TUNED}tune_lr = [0.1]\ntune_on = "custom"\n[[part]]\n[[part]]\ncluster = "8xgpu-1g"\nmodel = "cnn"',
            "part 2: unknown cluster in tune_on 'custom'. Valid: 8xgpu-1g, changed.",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = make(tmp_path, BASE + text)
    with pytest.raises(UserError) as caught:
        read(str(path))
    said = str(caught.value)
    assert said.startswith(f"suite {path}: ")
    assert message in said
    assert "\n" not in said
    assert "--" not in said


def test_virtual_time_needs_a_step_time(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="virtual time needs to know how long a step takes"):
        asked(tmp_path, 'steps = 1\nstrategies = ["asp"]')
    make(tmp_path, '[step]\nmean = "7ms"\n[[fault]]\nkind = "kill"\nworker = 1\nat = "2s"', "dies")
    asked(tmp_path, 'steps = 1\nstrategies = ["asp"]\ncluster = "dies.toml"')
    with pytest.raises(UserError, match="workers = 5000: at most 4096"):
        asked(tmp_path, 'steps = 1\nstrategies = ["asp"]\nstep_time = "1ms"\nworkers = 5000')


def test_an_unknown_suite_lists_what_ships(tmp_path: Path, inside: Inside) -> None:
    done = inside("suite", "quik")
    assert done.returncode == 2
    assert "unknown suite 'quik'; did you mean quick" in done.stderr
    assert "scaling" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--jobs", "0"), "--jobs 0"),
        (("--jobs", "2", "--clock", "real"), "--jobs 2: on the real clock"),
        (("--clock", "wall"), "--clock"),
        (("--results", "my.toml"), "is not a directory"),
    ],
)
def test_a_wrong_call_creates_nothing(tmp_path: Path, options: tuple[str, ...], message: str, inside: Inside) -> None:
    make(tmp_path, f'{BASE}strategies = ["asp"]')
    done = inside("suite", "my.toml", *options)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["my.toml"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, inside: Inside) -> None:
    make(tmp_path, f'{BASE}strategies = ["asp"]')
    make(tmp_path / "results" / "my", "", "letters")
    done = inside("suite", "my.toml")
    assert done.returncode == 2
    assert "is no suite's folder" in done.stderr
    assert [path.name for path in (tmp_path / "results" / "my").iterdir()] == ["letters.toml"]


def test_a_dry_run_prints_the_grid_and_creates_nothing(tmp_path: Path, inside: Inside) -> None:
    make(
        tmp_path,
        f'{BASE}seeds = 3\nwire = ["float32", "float16"]\nstrategies = ["asp", {{ name = "local-sgd", h = [2, 4] }}]',
    )
    done = inside("suite", "my.toml", "--dry-run", "--jobs", "3")
    assert done.returncode == 0, done.stderr
    head, *rows, last = done.stdout.splitlines()
    assert head.split() == ["strategy", "workers", "wire", "runs"]
    assert [row.split() for row in rows][1] == ["local-sgd", "h=2", "2", "float32", "3"]
    assert len(rows) == 6
    assert last == "18 runs on the virtual clock, 3 at a time, into results/my; 0 are finished"
    assert [path.name for path in tmp_path.iterdir()] == ["my.toml"]


def test_a_dry_run_of_parts_says_how_many_runs_each_has(tmp_path: Path, inside: Inside) -> None:
    path = make(tmp_path, PARTS.replace("steps", "tune_lr = [0.1, 0.3]\ntune_target = 0.9\nsteps", 1))
    done = inside("suite", "my.toml", "--dry-run", "--jobs", "3")
    assert done.returncode == 0, done.stderr
    assert [line.rstrip() for line in done.stdout.splitlines()] == [
        "part 1: mlp on digits, 10 steps, 4 runs, lr among 0.1, 0.3",
        "strategy  workers  runs",
        "bsp       2           2",
        "asp       2           2",
        "",
        "part 2: lenet5 on mnist5k, 5 s, 3 runs",
        "strategy  workers  runs",
        "bsp       2           3",
        "",
        "4 runs choose lr on seed 1000; 0 of them are finished",
        "7 runs on the virtual clock, 3 at a time, into results/my",
    ]
    done = inside("suite", "my.toml", "--dry-run", "--jobs", "3", "--only", "asp_*_s1")
    assert [line.rstrip() for line in done.stdout.splitlines()] == [
        "part 1: mlp on digits, 10 steps, 1 runs, lr among 0.1, 0.3",
        "strategy  workers  runs",
        "asp       2           1",
        "",
        "part 2: no runs",
        "",
        "2 runs choose lr on seed 1000; 0 of them are finished",
        "1 runs on the virtual clock, 3 at a time, into results/my",
    ]
    done = inside("suite", "my.toml", "--only", "ssp")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "sapus: --only ssp: is in the name of none of 7 runs; they are called as in bsp_digits"
    )
    assert list(tmp_path.iterdir()) == [path]


# --- The learning rate ---


def test_the_rate_that_reaches_the_target_first_is_chosen() -> None:
    slow, fast = Tried(0.03, 20.0, 0.95), Tried(0.1, 10.0, 0.93)
    never, nearly, lost = Tried(0.3, None, 0.80), Tried(1.0, None, 0.89), Tried(3.0, None, 0.90, diverged=True)
    assert best_rate([slow, fast, never]) == 0.1
    assert best_rate([never, slow]) == 0.03
    assert best_rate([never, nearly, lost]) == 1.0, "what diverged comes last, whatever it had reached"
    assert best_rate([Tried(0.3, None, None, diverged=True), lost]) == 3.0
    assert best_rate([Tried(0.2, 10.0, 0.99), fast]) == 0.2, "the first of equals"


def test_each_group_is_tuned_by_itself_on_the_same_rates(tmp_path: Path) -> None:
    text = """
        steps = 10
        seeds = 2
        workers = [4, 8]
        step_time = "50ms"
        target_accuracy = 0.8
        tune_lr = [0.03, 0.1]
        tune_target = 0.9
        tune_seed = 77
        strategies = ["bsp", { name = "local-sgd", h = [1, 4] }]
    """
    found = asked(tmp_path, text)
    tuning = found.tuning_cells()
    assert len(tuning) == 2 * 3 * 2
    assert {(cell.config.seed, cell.config.target_accuracy) for cell in tuning} == {(77, 0.9)}
    assert [cell.config.lr for cell in tuning] == [0.03, 0.1] * 6
    choices = found.choices()
    assert [cell for choice in choices for cell in choice.cells] == tuning
    rates = {choice.group: 0.03 for choice in choices} | {choices[0].group: 0.1}
    cells = found.cells(rates)
    assert len(cells) == 2 * 3 * 2
    chosen = {(c.config.strategy, c.config.workers, c.config.seed): c.config.lr for c in cells}
    assert (chosen["bsp", 4, 0], chosen["bsp", 4, 1], chosen["bsp", 8, 0]) == (0.1, 0.1, 0.03)
    assert {cell.config.target_accuracy for cell in cells} == {0.8}


def test_one_learning_rate_for_all_clusters_is_tuned_on_one(tmp_path: Path) -> None:
    text = """
        steps = 10
        workers = [2, 4]
        tune_lr = [0.03, 0.1]
        tune_target = 0.9
        tune_on = "fast"
        cluster = [{ name = "slow", step_time = "1s" }, { name = "fast", step_time = "50ms" }]
        strategies = ["bsp", { name = "asp", lr = [0.2, 0.4] }]
    """
    found = asked(tmp_path, text)
    assert [cell.name for cell in found.tuning_cells()] == [
        f"bsp_w{workers}_fast{lr}_s1000" for workers in (2, 4) for lr in ("_lr0.03", "")
    ]
    two, four = found.choices()
    assert [cell.name for cell in found.cells({two.group: 0.03, four.group: 0.1})] == [
        f"{name}_s0"
        for cluster in ("slow", "fast")
        for name in (
            *(f"bsp_w2_{cluster}_lr0.03", f"asp_w2_{cluster}_lr0.2", f"asp_w2_{cluster}_lr0.4"),
            *(f"bsp_w4_{cluster}", f"asp_w4_{cluster}_lr0.2", f"asp_w4_{cluster}_lr0.4"),
        )
    ]
    assert {cell.config.strategy for cell in found.cells({})} == {"asp"}, "what is not tuned yet has no name"
    changed = 'tune_on = "8xgpu-1g"\ncluster = ["8xgpu-10g", "8xgpu-1g"]\nwire_scale = 9'
    text = f'steps = 1\nstrategies = ["asp"]\ntune_lr = [1, 2]\ntune_target = 0.9\n{changed}'
    assert {cell.config.cluster.name for cell in asked(tmp_path, text).tuning_cells()} == {"8xgpu-1g, changed"}


def test_each_part_says_itself_whether_and_how_it_is_tuned(tmp_path: Path) -> None:
    tuned, given = "tune_lr = [0.03, 0.1]\ntune_target = 0.9\n", "lr = 0.2\ntune_target = 0.9\ntune_seed = 7\n"
    text = f"""{BASE}strategies = ["asp"]
        top
        [[part]]
        [[part]]
        workers = 3
        lr = 0.3
        [[part]]
        workers = 4
        tune_lr = [0.5]
        tune_target = 0.8
    """
    runs = asked(tmp_path, text.replace("top", tuned)).asked
    assert [one.tuning and (one.tuning.rates, one.tuning.target, one.tuning.seed) for one in runs] == [
        ((0.03, 0.1), 0.9, 1000),
        None,
        ((0.5,), 0.8, 1000),
    ]
    assert runs[1].config.lr == 0.3
    runs = asked(tmp_path, text.replace("top", given)).asked
    assert [one.tuning and (one.tuning.rates, one.tuning.target, one.tuning.seed) for one in runs] == [
        None,
        None,
        ((0.5,), 0.8, 7),
    ]
    assert [one.config.lr for one in runs[:2]] == [0.2, 0.3]


def test_parts_of_other_budgets_and_clusters_share_their_tuning(tmp_path: Path) -> None:
    text = """
        strategies = ["asp"]
        wire_scale = 9
        tune_lr = [0.1, 0.3]
        tune_target = 0.9
        tune_on = "8xgpu-10g"
        tune_seconds = 5
        [[part]]
        seconds = 20
        cluster = { name = "fast", profile = "8xgpu-10g" }
        [[part]]
        steps = 40
        cluster = "8xgpu-1g"
    """
    found = asked(tmp_path, text)
    (choice,) = found.choices()
    assert [cell.config.lr for cell in choice.cells] == [0.1, 0.3]
    for config in (cell.config for cell in choice.cells):
        assert (config.seconds, config.steps, config.epochs) == (5, None, None)
        assert (config.cluster.name, config.cluster.wire_scale) == ("8xgpu-10g, changed", 9)
        assert config.cluster.link.bytes_per_s == 1.25e9
    measured = [cell.config for cell in found.cells({choice.group: 0.3})]
    assert [(config.lr, config.seconds, config.steps) for config in measured] == [(0.3, 20, None), (0.3, None, 40)]


def test_a_tuning_run_that_two_choices_share_is_made_once(tmp_path: Path) -> None:
    text = f"""{BASE}strategies = ["asp"]
        tune_target = 0.9
        [[part]]
        tune_lr = [0.1, 0.3]
        [[part]]
        tune_lr = [0.3, 0.5]
        seeds = [1]
    """
    found = asked(tmp_path, text)
    assert [[cell.config.lr for cell in choice.cells] for choice in found.choices()] == [[0.1, 0.3], [0.3, 0.5]]
    assert [cell.config.lr for cell in found.tuning_cells()] == [0.1, 0.3, 0.5]


# --- The folder ---


def fake(folder: Path, cell: Cell, status: str = "finished", clock: str = "virtual") -> None:
    """A run folder that says it is the run of a cell."""
    (folder / cell.name).mkdir(parents=True)
    record = {"status": status, "clock": clock, "config": suite.as_recorded(cell.config)}
    write_run(folder / cell.name, record)


def seen(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_finished_stays_and_what_is_half_done_goes(tmp_path: Path) -> None:
    cells = asked(tmp_path, f'{BASE}strategies = ["asp"]\nseeds = 7').cells()
    folder = tmp_path / "suite"
    for cell, status in zip(cells, ["finished", "running", "interrupted", "failed"], strict=False):
        fake(folder, cell, status)
    fake(folder, cells[4], clock="real")
    (folder / cells[5].name).mkdir()
    # A run of before there was a choice of wire and transport is the run that is asked for all the same.
    record = read_run(folder / cells[0].name)
    del record["config"]["wire"], record["config"]["transport"]
    write_run(folder / cells[0].name, record)
    shelf = Shelf(folder, "virtual")
    assert [shelf.standing(cell) for cell in cells] == [
        *("finished", "running", "interrupted", "failed"),
        *("waiting", "waiting", "waiting"),
    ]
    assert shelf.tidy(cells, retry=False) == [cells[4].name]
    assert seen(folder) == sorted([".aside", cells[0].name, cells[3].name])
    assert shelf.tidy(cells, retry=True) == []
    assert seen(folder) == sorted([".aside", cells[0].name])


def test_what_is_no_longer_asked_for_is_put_aside_and_comes_back(tmp_path: Path) -> None:
    cells = asked(tmp_path, f'{BASE}strategies = ["asp", "bsp"]').cells()
    longer = asked(tmp_path, f'{BASE}strategies = ["asp", "bsp"]'.replace("steps = 6", "steps = 7")).cells()
    folder = tmp_path / "suite"
    for cell in cells:
        fake(folder, cell)
    shelf = Shelf(folder, "virtual")
    assert shelf.tidy(cells[:1], retry=False) == [cells[1].name]
    assert find_runs([folder]) == [folder / cells[0].name]
    assert find_runs([tmp_path / "sui*" / "*"]) == [folder / cells[0].name], "a pattern passes over it too"
    assert shelf.tidy(longer, retry=False) == [longer[0].name], "of the same name, but another run"
    assert seen(folder) == [".aside"]
    fake(folder, longer[0])
    assert shelf.tidy(cells, retry=False) == [cells[0].name]
    assert [read_run(folder / cell.name)["config"]["steps"] for cell in cells] == [6, 6]
    assert seen(folder / ".aside") == ["asp_w2_custom_s0_2"]


def test_a_finished_run_takes_the_name_that_it_has_now(tmp_path: Path) -> None:
    before = asked(tmp_path, f'{BASE}seeds = 3\nstrategies = ["asp"]').cells()
    after = asked(tmp_path, f'{BASE}seeds = 3\nstrategies = ["asp"]\n[[part]]\n[[part]]\nmodel = "cnn"').cells()
    folder = tmp_path / "suite"
    for cell, status in zip(before, ["finished", "failed", "finished"], strict=True):
        fake(folder, cell, status)
    shelf = Shelf(folder, "virtual")
    assert shelf.tidy(after, retry=False, only={"asp_cnn_w2_custom_s0"}) == []
    assert seen(folder) == ["asp_mlp_w2_custom_s0", "asp_mlp_w2_custom_s2", "asp_w2_custom_s1"], (
        "others stay as they are"
    )
    assert shelf.tidy(before, retry=True, only={"asp_w2_custom_s0"}) == []
    assert seen(folder) == ["asp_w2_custom_s0", "asp_w2_custom_s1", "asp_w2_custom_s2"]
    assert shelf.tidy(after, retry=False) == ["asp_w2_custom_s1"]
    assert seen(folder) == [".aside", "asp_mlp_w2_custom_s0", "asp_mlp_w2_custom_s2"]


# --- The command ---


def ledger(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "suite.json").read_text())
    return document


def states(folder: Path) -> dict[str, tuple[str, int]]:
    return {cell["name"]: (cell["state"], cell["attempts"]) for cell in ledger(folder)["cells"]}


@pytest.mark.slow
def test_a_suite_runs_and_a_second_time_does_nothing_but_what_was_added(tmp_path: Path, inside: Inside) -> None:
    path = make(tmp_path, f'{BASE}seeds = 2\nstrategies = ["asp"]')
    done = inside("suite", "my.toml", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "results" / "my"
    assert done.stdout.splitlines() == [
        "2 of 2 runs finished",
        "Suite folder: results/my",
        "Next: sapus compare results/my",
    ]
    assert re.search(r"1 of 2, about \d+ s left  asp_w2_custom_s0  0\.\d s  \d", done.stderr)
    assert states(folder) == {"asp_w2_custom_s0": ("finished", 1), "asp_w2_custom_s1": ("finished", 1)}
    before = {name: (folder / name / "run.json").stat().st_mtime_ns for name in states(folder)}
    path.write_text(f'{BASE}seeds = 1\nstrategies = ["asp", "bsp"]')
    done = inside("suite", "my.toml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "2 of 2 runs finished, 1 of them before"
    assert "1 runs no longer asked for, put aside into results/my/.aside: asp_w2_custom_s1" in done.stderr
    assert (folder / "asp_w2_custom_s0" / "run.json").stat().st_mtime_ns == before["asp_w2_custom_s0"]
    assert [run.name for run in find_runs([folder])] == ["asp_w2_custom_s0", "bsp_w2_custom_s0"]
    quiet = inside("suite", "my.toml", "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    plan = inside("suite", "my.toml", "--dry-run")
    assert plan.stdout.endswith("; 2 are finished\n")


LONG = 'model = "mlp"\nworkers = 2\nstep_time = "50ms"\neval_every = 1\nepochs = 40\nseeds = 4\nstrategies = ["asp"]\n'


@contextmanager
def under_way(tmp_path: Path) -> Iterator[Background]:
    """A suite of which one run is finished and the next one writes."""
    run = start(tmp_path, "suite", "my.toml", "--jobs", "1")
    places = [tmp_path / "results" / "my" / f"asp_w2_custom_s{seed}" / "run.json" for seed in (0, 1)]
    try:
        run.wait_for(lambda: places[1].exists() and read_run(places[0].parent)["status"] == "finished", "a second run")
        yield run
    finally:
        run.process.kill()
        run.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_was_killed_goes_on_where_it_was(tmp_path: Path, number: signal.Signals, inside: Inside) -> None:
    make(tmp_path, LONG)
    with under_way(tmp_path) as run:
        run.process.send_signal(number)
        code, _, err = run.end()
    folder = tmp_path / "results" / "my"
    first = (folder / "asp_w2_custom_s0" / "run.json").stat().st_mtime_ns
    if number == signal.SIGINT:
        assert code == 130
        assert err.endswith("what is finished is kept; go on with: sapus suite my.toml\n")
        assert states(folder)["asp_w2_custom_s1"] == ("interrupted", 1)
        assert states(folder)["asp_w2_custom_s2"] == ("waiting", 0)
    make(tmp_path, LONG.replace("seeds = 4", "seeds = 2"))
    done = inside("suite", "my.toml")
    assert done.returncode == 0, done.stderr
    assert states(folder) == {"asp_w2_custom_s0": ("finished", 1), "asp_w2_custom_s1": ("finished", 2)}
    assert (folder / "asp_w2_custom_s0" / "run.json").stat().st_mtime_ns == first


@pytest.mark.slow
def test_two_commands_do_not_work_in_one_folder(tmp_path: Path, inside: Inside) -> None:
    make(tmp_path, LONG)
    with under_way(tmp_path) as run:
        done = inside("suite", "my.toml")
        assert done.returncode == 2
        assert "another sapus suite is at work in results/my" in done.stderr
        run.process.send_signal(signal.SIGTERM)
        assert run.end()[0] == 130


@pytest.mark.slow
def test_what_failed_is_reported_and_made_again_when_asked(tmp_path: Path, inside: Inside) -> None:
    path = make(tmp_path, f'{BASE.replace("steps = 6", "steps = 100")}lr = [0.1, 1e30]\nstrategies = ["asp"]')
    done = inside("suite", "my.toml")
    folder = tmp_path / "results" / "my"
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == "1 of 2 runs finished"
    report = done.stderr[done.stderr.index("sapus: ") :].splitlines()
    assert report[0] == "sapus: 1 of 2 runs failed; to make them once more: sapus suite my.toml --retry"
    assert report[1].startswith("asp_w2_custom_lr1e30_s0: diverged: no worker pushes finite numbers")
    again = inside("suite", "my.toml")
    assert again.returncode == 1
    assert again.stderr.endswith(report[1] + "\n")
    assert states(folder)["asp_w2_custom_lr1e30_s0"] == ("failed", 1)
    assert inside("suite", "my.toml", "--retry").returncode == 1
    assert states(folder) == {"asp_w2_custom_s0": ("finished", 1), "asp_w2_custom_lr1e30_s0": ("failed", 2)}
    path.write_text(path.read_text().replace("lr = [0.1, 1e30]", "lr = 0.1"))
    assert inside("suite", "my.toml").returncode == 0


@pytest.mark.slow
def test_the_learning_rate_is_tuned_where_compare_does_not_look(tmp_path: Path, inside: Inside) -> None:
    text = """
        model = "mlp"
        epochs = 6
        workers = 2
        step_time = "50ms"
        eval_every = 0.5
        tune_lr = [0.0001, 0.1, 1e30]
        tune_target = 0.8
        strategies = ["bsp"]
    """
    make(tmp_path, text)
    done = inside("suite", "my.toml")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "results" / "my"
    assert re.search(r"tuned bsp_w2_custom: lr 0\.1 \(\d+\.\d s to the target\)", done.stderr)
    tuning = ledger(folder)["tuning"]
    assert (tuning["rates"], tuning["seed"], tuning["target"]) == ([0.0001, 0.1, 1e30], 1000, 0.8)
    (chosen,) = tuning["chosen"]
    assert (chosen["strategy"], chosen["lr"]) == ("bsp", 0.1)
    assert [one["diverged"] for one in chosen["tried"]] == [False, False, True]
    assert [run["state"] for run in tuning["runs"]] == ["finished", "finished", "failed"]
    assert [cell["lr"] for cell in ledger(folder)["cells"]] == [0.1]
    assert [run.name for run in find_runs([folder])] == ["bsp_w2_custom_s0"]
    assert read_run(folder / "bsp_w2_custom_s0")["config"]["target_accuracy"] is None
    shutil.rmtree(folder / "bsp_w2_custom_s0")
    done = inside("suite", "my.toml")
    assert done.returncode == 0
    assert "3 of 3 runs are there already" in done.stderr


@pytest.mark.slow
def test_parts_are_tuned_and_run_a_few_at_a_time(tmp_path: Path, inside: Inside) -> None:
    text = """
        epochs = 1
        workers = 2
        step_time = "50ms"
        compare_target = 0.9
        strategies = ["bsp", "asp"]
        [[part]]
        model = "mlp"
        tune_lr = [0.0001, 0.1]
        tune_target = 0.3
        tune_on = "custom"
        cluster = ["none", { name = "slow", link = "1mbit" }]
        [[part]]
        dataset = "null"
        model = "null:100"
        steps = 3
        strategies = ["bsp"]
    """
    path = make(tmp_path, text)
    done = inside("suite", "my.toml", "--only", "bsp*slow", "--only", "null")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "2 of 2 runs finished; 3 others left as they are",
        "Suite folder: results/my",
        "Next: sapus compare 'results/my/*_digits-mlp_*'",
        "Next: sapus compare 'results/my/*_null-null-100_*'",
    ]
    folder = tmp_path / "results" / "my"
    first = ("bsp_digits-mlp_w2_slow_epochs1_s0", "bsp_null-null-100_w2_custom_steps3_s0")
    assert states(folder) == {
        "bsp_digits-mlp_w2_custom_epochs1_s0": ("waiting", 0),
        **dict.fromkeys(first, ("finished", 1)),
    }, "the learning rate of asp is not chosen yet"
    assert ledger(folder)["n_cells"] == 5
    assert [run["state"] for run in ledger(folder)["tuning"]["runs"]] == ["finished", "finished", "waiting", "waiting"]
    path.write_text(text.replace("steps = 3", "epochs = 2"))
    done = inside("suite", "my.toml", "--only", "asp")
    assert done.returncode == 0, done.stderr
    assert {name: state for name, (state, _) in states(folder).items()} == {
        "bsp_digits-mlp_w2_custom_epochs1_s0": "waiting",
        "asp_digits-mlp_w2_custom_epochs1_s0": "finished",
        "bsp_digits-mlp_w2_slow_epochs1_s0": "finished",
        "asp_digits-mlp_w2_slow_epochs1_s0": "finished",
        "bsp_null-null-100_w2_custom_epochs2_s0": "waiting",
    }
    assert (folder / first[1]).is_dir(), "a run that is no longer asked for is put aside when all are"
    assert {cell["target"] for cell in ledger(folder)["cells"]} == {0.9}
    tuning = ledger(folder)["tuning"]
    assert [(one["strategy"], one["cluster"], one["model"], one["lr"]) for one in tuning["chosen"]] == [
        ("bsp", "custom", "mlp", 0.1),
        ("asp", "custom", "mlp", 0.1),
    ]


@pytest.mark.slow
def test_on_the_real_clock_one_run_follows_the_other(tmp_path: Path) -> None:
    make(tmp_path, 'clock = "real"\nmodel = "mlp"\nsteps = 10\nworkers = 2\nseeds = 2\nstrategies = ["local-sgd"]')
    done = sapus("suite", "my.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "results" / "my"
    assert states(folder) == {"local-sgd_w2_s0": ("finished", 1), "local-sgd_w2_s1": ("finished", 1)}
    first, second = (read_run(folder / f"local-sgd_w2_s{seed}") for seed in (0, 1))
    assert (first["clock"], second["clock"]) == ("real", "real")
    assert first["ended_at"] < second["started_at"]
    assert second["startup_s"] < first["startup_s"], "the start-up of a run is its own"


def test_a_run_that_cannot_be_read_is_put_aside_and_not_deleted(tmp_path: Path) -> None:
    cell = Cell("bsp_w2_s0", RunConfig(strategy="bsp", workers=2, steps=1))
    place = tmp_path / cell.name
    place.mkdir()
    (place / "run.json").write_text('{"schema_version": 99, "status": "finished"}')
    shelf = Shelf(tmp_path, "virtual")
    assert shelf.standing(cell) == "waiting"
    assert shelf.tidy([cell], retry=True) == [cell.name]
    assert (tmp_path / ".aside" / cell.name / "run.json").is_file()
    assert shelf.tidy([cell], retry=True) == []


def test_a_link_to_a_half_done_run_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    cell = Cell("bsp_w2_s0", RunConfig(strategy="bsp", workers=2, steps=1))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / cell.name).symlink_to(elsewhere)
    assert Shelf(folder, "virtual").tidy([cell], retry=False) == []
    assert elsewhere.is_dir()
    assert not (folder / cell.name).is_symlink()
