"""The models that benchmarks measure: ours and those of other libraries, as their users run them."""
