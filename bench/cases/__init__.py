"""What is measured: a module for each benchmark, by the name of its op or model, with the tiles that it tunes."""
