"""The update strategies that ship with sapus, one a file."""

REGISTRY: dict[str, str] = {
    "bsp": "strategies.bsp:Bsp",
    "asp": "strategies.asp:Asp",
    "local-sgd": "strategies.local_sgd:LocalSgd",
}
"""Name on the command line -> "module:class". Text, so that looking a name up imports nothing."""
