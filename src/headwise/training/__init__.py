"""The training loop that distillation and training from scratch share."""
