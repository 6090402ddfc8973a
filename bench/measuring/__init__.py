"""How it is measured: contenders, timing, the GPU's ceilings, the environment, result files, the tuner."""
