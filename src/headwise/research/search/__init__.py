"""Search for shapes by training a little: an Optuna study under a budget. Importing this is light."""
