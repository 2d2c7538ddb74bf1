"""What the fork server imports before it forks, once for all children.

torch imports a quarter of a million objects that stay: looking for garbage among them again and again costs a sixth of
the time. Frozen, they are never looked at again, so that the children go on sharing their pages.
"""

from __future__ import annotations

import gc

gc.disable()

from sapus_cli.drivers import process  # noqa: E402

process.load_torch()

import sapus_cli.drivers.roles  # noqa: E402, F401

gc.freeze()
gc.enable()
