"""Device-dependent facts: hardware features and cost rules."""
