"""The certificate: exactness, quality and speed of a reshaped model, each measured, with error bars."""
