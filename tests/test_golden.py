"""Runs in virtual time whose every row is kept as a digest, in tests/golden/.

A change that moves a bit on purpose remakes them: `python tests/golden_runs.py`. Then say in the change why.
"""

from __future__ import annotations

import golden_runs
import pytest


@pytest.mark.parametrize("name", golden_runs.RUNS)
def test_a_kept_run_comes_out_the_same(name: str) -> None:
    kept, here = golden_runs.kept(name), golden_runs.made_with()
    if kept["made_with"] != here:
        pytest.skip(f"made with {kept['made_with']}, this is {here}: other kernels, other bits")
    assert golden_runs.digests(name) == kept["sha256"]
