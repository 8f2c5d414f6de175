"""Training from scratch: `headwise train`, with files, checkpoints and several processes."""
