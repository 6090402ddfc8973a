"""Parity suite: every op and model against a reference written in torch."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the checkout
