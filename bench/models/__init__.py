"""The models that benchmarks measure: ours, and other libraries' as their users run them."""
