"""Suites and cluster profiles, shipped as package data."""
