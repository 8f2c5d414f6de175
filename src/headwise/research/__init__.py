"""The researcher's half: theory, designs, search, training from scratch, experiments. No stage imports it."""
