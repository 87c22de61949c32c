"""How right an answer is: metrics of benchmarks, 0 to 1."""
