"""Runs in virtual time whose results are kept: what they are, what they gave here, and the files that hold it.

    python tests/golden_runs.py

writes the JSON files in tests/golden/ anew. The bits of a run depend on the build of torch and on which of its kernels
the CPU gets, so both are kept with them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from sapus_cli.cluster import ClusterProfile, Link, Pause
from sapus_cli.config import RunConfig
from sapus_cli.drivers.simulate import Simulation

FOLDER = Path(__file__).parent / "golden"
FILES = ("pushes.csv", "evals.csv", "events.csv")

RUNS = {
    "sapus-weighted": RunConfig(
        strategy="sapus-weighted",
        workers=4,
        model="mlp",
        steps=60,
        eval_every_s=1.0,
        seed=3,
        momentum=0.5,
        cluster=ClusterProfile(
            step_s=0.05,
            variation=0.3,
            slow={1: 2.0},
            pause=Pause(probability=0.02, mean_s=0.5),
            link=Link(bytes_per_s=1e8, latency_s=0.001),
            wire_scale=20,
        ),
    ),
    "ssp-adamw": RunConfig(
        strategy="ssp",
        params={"s": 2},
        workers=3,
        model="cnn",
        steps=25,
        eval_every_s=0.5,
        seed=1,
        optimizer="adamw",
        lr=0.002,
        partition="dirichlet:0.5",
        cluster=ClusterProfile(step_s=0.05, slow={2: 3.0}, link=Link(bytes_per_s=1e7, latency_s=0.002)),
    ),
}


def made_with() -> dict[str, str]:
    """What the bits of a run depend on, as far as it can be named."""
    try:
        vendor = re.search(r"^vendor_id\s*:\s*(\S+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        vendor = None
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_vendor": vendor[1] if vendor else platform.processor(),
    }


def digests(name: str) -> dict[str, str]:
    """SHA-256 of every file of a run whose content is determined, and of its final state."""
    with tempfile.TemporaryDirectory() as results:
        folder, record = Simulation(RUNS[name], Path(results), None, lambda _: None).run()
        found = {file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in FILES}
    return {**found, "state": record["state_sha256"]}


def kept(name: str) -> dict[str, Any]:
    """What is kept of a run."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def main() -> None:
    """Write every file anew."""
    torch.set_num_threads(1)
    for name in RUNS:
        text = json.dumps({"made_with": made_with(), "sha256": digests(name)}, indent=2)
        (FOLDER / f"{name}.json").write_text(text + "\n")
        sys.stdout.write(f"{name}.json\n")


if __name__ == "__main__":
    main()
