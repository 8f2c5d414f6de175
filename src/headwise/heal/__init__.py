"""Repairs, cheapest first. `refit` is closed form: forward passes and one solve per projection."""
