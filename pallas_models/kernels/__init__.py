"""Kernel bodies, one package per Pallas backend. `pallas_models.ops` is the public interface to them."""
