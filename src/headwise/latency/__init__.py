"""Measured times: workloads run on this device, and the tables that price plans."""
