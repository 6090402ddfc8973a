"""What is measured: a module a benchmark, by the stem of its op or model, and the models that they compare."""
