"""The papers' mathematics as functions: a bound and its exact solver, softmax saturation, conditioning. NumPy only."""
