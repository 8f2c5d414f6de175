"""Engines that serve models: does a saved model answer there as it does here, and how large is its cache? No torch."""
