"""Training: `loop.fit` trains any module in memory; `headwise train` is that with files, checkpoints and processes."""
