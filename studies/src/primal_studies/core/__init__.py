"""Studies of single layers, kernels and solvers."""
