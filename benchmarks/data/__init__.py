"""Examples to train on."""
