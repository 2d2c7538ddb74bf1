"""sapus: compare parameter-update strategies for data-parallel training on a parameter server."""

__version__ = "0.1.0"
