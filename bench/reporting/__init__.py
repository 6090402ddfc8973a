"""How it is shown: tables, plots, pages, and the comparison of two results."""
