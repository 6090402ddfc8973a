"""Parity suite: every op and model against a reference written in torch."""
