"""Each claim of the two papers as one experiment: run it, read its result, see the verdict."""
